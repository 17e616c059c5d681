// The line with a code that ends the text of an error, as Python writes it
// (src/hostcall/_core/codes.py). The texts of errors that only a defect of the
// engine can raise have none.
#pragma once

/// To be written after a text: `"hostcall: no" HOSTCALL_CODE("hc-buffer")`.
#define HOSTCALL_CODE(code) "\n[" code "] python -m hostcall explain " code
