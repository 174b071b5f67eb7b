"""Work inside the directories of an Orbax ``CheckpointManager``."""
