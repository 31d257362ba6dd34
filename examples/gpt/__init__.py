"""The rooms of the example. train.py, sample.py and prepare.py beside them are what a user starts.

model.py, nanogpt.py     the two architectures, each on a page; generate.py: text from either
presets.py               their sizes, and how each is trained
options.py, cli.py       train.py's command line; what all commands share
corpus.py, shards.py     text and files of tokens; tokens.py: the tokenizers; data.py: batches
step.py, schedule.py     optimizer, forward, backward, update, validation; the learning rate
checkpoint.py            what a run needs to go on
logging.py, speed.py     rows of numbers, and where they go; MFU and the optimizer's time
record.py                config.json, and the lines a run begins with
ranks.py                 several processes
"""
