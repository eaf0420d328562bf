"""From call sites to source: file, line, columns, expression."""
