class Variable:
    pass
