//! The crate's `caching` against the golden vectors and against the model.

use fraglab::alloc::BuildInputs;
use fraglab::alloc::caching::Caching;
use fraglab::alloc::spec::{AllocSpec, Params};

use crate::caching_property::{Case, compare_random_programs};
use crate::golden::{self, Vector, run_plain_vectors};

fn build(inputs: &BuildInputs) -> Caching {
    let spec: AllocSpec = "caching".parse().expect("a name");
    Caching::build(Params::new(&spec), inputs)
        .unwrap_or_else(|error| panic!("{error}: {:?}", inputs.settings))
}

#[test]
fn caching_reproduces_the_plain_vectors() {
    run_plain_vectors(|vector: &Vector| {
        build(&BuildInputs {
            settings: Some(vector.config.to_owned()),
            device_total_bytes: Some(vector.device_bytes),
            stream_handles: golden::STREAM_HANDLES.to_vec(),
            ..BuildInputs::default()
        })
    });
}

#[test]
fn caching_does_what_the_model_does() {
    compare_random_programs(|case: &Case| {
        build(&BuildInputs {
            settings: Some(case.conf.clone()),
            limit_bytes: case.limit_bytes,
            device_total_bytes: Some(case.device_total_bytes),
            stream_handles: case.stream_handles.clone(),
            ..BuildInputs::default()
        })
    });
}
