#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fraglab_fuzz::run("words", data));
