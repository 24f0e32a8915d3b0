"""Is the gradient right, here, with this model, these rows and these processes?

`audit.py` asks it of an update that `repeated_update.py` runs again and again, beside `plain_step.py`; `row_checks.py`
looks at the rows of all ranks.
"""
