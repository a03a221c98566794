"""Training of the small models that ship with the package; nothing else in the package needs it."""
