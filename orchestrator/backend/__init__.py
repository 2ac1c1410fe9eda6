"""Transfer backends: a plan in, a receipt out. The only room that knows LMCache."""
