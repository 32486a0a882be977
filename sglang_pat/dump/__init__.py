# SPDX-License-Identifier: Apache-2.0
"""Decode batches dumped from a running server, as paths and lengths: ``sglang-pat dump``.

``records`` is the format of a file, ``request`` how a dump is asked for, ``watch`` what writes it
in the server, ``command`` what asks. None of them knows SGLang; ``sglang_pat.srt.dump`` does.
"""
