"""The command line: parse, call the library, print, say what was written where."""
