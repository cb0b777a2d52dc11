"""Where tokens come from: the one grammar of ``--source``, ``--text`` and ``--calibrate``."""
