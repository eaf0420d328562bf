"""Live objects: frames, names, modules and who holds a value. Nothing of the user's runs."""
