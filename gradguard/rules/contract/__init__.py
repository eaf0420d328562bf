"""GG4xx: what backward, custom Functions, hooks and dtypes demand, and who did not keep to it."""
