"""Problems to try an optimizer on."""
