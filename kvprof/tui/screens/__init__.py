"""The screens of the live view, one per file; each draws the state and changes nothing."""
