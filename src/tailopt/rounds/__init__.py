"""The arithmetic between two synchronised weights; knows no model, no data and no process."""
