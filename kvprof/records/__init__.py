"""What is measured, on disk: result schema, reading and writing.

Standard library and jsonschema only; the environment block is collected elsewhere and passed in.
"""
