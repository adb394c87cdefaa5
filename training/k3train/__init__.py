"""How the shipped model was made: corpus, tokenizer, target, draft, export and their figures.

Not part of the installed package. `python training/make_model.py --help`.
"""
