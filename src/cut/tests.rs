//! Tests of a cut, on fakes that write down what happens.
