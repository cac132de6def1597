/* What the files of the extension module have of each other. */
#ifndef NF4_FAST_H
#define NF4_FAST_H

#include <Python.h>

extern PyType_Spec nf4_calls_spec;

#endif
