"""A new framework: every file that it needs, with what is missing marked, and a list of what is left.

`python -m benchmarks.new_framework NAME --overrides | --flags | --file` writes the files.
`python -m benchmarks.new_framework NAME --missing` lists what no file says yet.
"""
