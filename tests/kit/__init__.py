# SPDX-License-Identifier: Apache-2.0
"""What tests share: trees and plans, inputs to run them on, models' config.json, stand-ins for
SGLang, GPUs and other backends."""
