"""What a run leaves behind: its folder, its history, its checkpoints."""
