"""Opens and closes a guarded session and routes what its probes see."""
