/* The declarations that _nf4_fast.c uses of _nf4_ops.cpp, _nf4_lora.cpp and _nf4_grouped.cpp. */
#ifndef NF4_FAST_H
#define NF4_FAST_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif
extern PyMethodDef nf4_operator_methods[], nf4_lora_methods[], nf4_grouped_methods[];
#ifdef __cplusplus
}
#endif

#endif
