"""A framework whose process answers with something that is no answer, before it is asked."""

from __future__ import annotations

import os

from support.study.fake_framework import FAKE

os.write(3, b"hello, this is not JSON\n")  # where the worker has put its answers

FRAMEWORK = FAKE
