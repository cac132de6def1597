/* What the files of the extension module have of each other. */
#ifndef NF4_FAST_H
#define NF4_FAST_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif
extern PyType_Spec nf4_calls_spec;
extern PyMethodDef nf4_operator_methods[];
#ifdef __cplusplus
}
#endif

#endif
