"""The quality study: adapters, traces, policies and their guarantee over the tasks of a folder, a stage at a time."""
