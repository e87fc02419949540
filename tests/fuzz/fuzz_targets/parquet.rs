#![no_main]

use std::panic;

libfuzzer_sys::fuzz_target!(
    // Polars panics at files that it did not expect, and the reader catches it: only a panic that
    // leaves the reader is a finding. The fuzzer's own hook would end the process at both.
    init: panic::set_hook(Box::new(|_| ())),
    |data: &[u8]| fraglab_fuzz::run("parquet", data)
);
