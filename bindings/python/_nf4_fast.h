/* What _nf4_fast.c has of _nf4_ops.cpp and _nf4_lora.cpp. */
#ifndef NF4_FAST_H
#define NF4_FAST_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif
extern PyMethodDef nf4_operator_methods[], nf4_lora_methods[];
#ifdef __cplusplus
}
#endif

#endif
