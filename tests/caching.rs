//! The crate's `caching` against the golden vectors and against the model.

use fraglab::alloc::BuildInputs;
use fraglab::alloc::caching::Caching;
use fraglab::alloc::spec::{AllocSpec, Params};
use fraglab::trace::{Pool, PoolKind};

use crate::caching_faults::survive_every_fault;
use crate::caching_property::{Case, compare_random_programs};
use crate::golden::{self, Vector, run_vectors};

fn build(research_after_flush: bool, inputs: &BuildInputs) -> Caching {
    let text = if research_after_flush { "caching+research_after_flush=true" } else { "caching" };
    let spec: AllocSpec = text.parse().expect("a name");
    Caching::build(Params::new(&spec), inputs)
        .unwrap_or_else(|error| panic!("{error}: {:?}", inputs.settings))
}

fn build_for_case(case: &Case) -> Caching {
    build(
        case.research_after_flush(),
        &BuildInputs {
            settings: Some(case.conf.clone()),
            limit_bytes: case.limit_bytes,
            device_total_bytes: Some(case.device_total_bytes),
            stream_handles: case.stream_handles().to_vec(),
            pools: case.pools().to_vec(),
            settings_changes: case.settings_changes.clone(),
            ..BuildInputs::default()
        },
    )
}

#[test]
fn caching_reproduces_the_vectors() {
    run_vectors(|vector: &Vector| {
        build(
            vector.research_after_flush,
            &BuildInputs {
                settings: Some(vector.config.to_owned()),
                device_total_bytes: Some(vector.device_bytes),
                stream_handles: golden::STREAM_HANDLES.to_vec(),
                pools: vector.pools.clone(),
                settings_changes: vector.settings_changes.iter().map(|&s| s.to_owned()).collect(),
                ..BuildInputs::default()
            },
        )
    });
}

#[test]
fn caching_does_what_the_model_does() {
    compare_random_programs(build_for_case);
}

#[test]
fn caching_survives_a_failure_of_any_device_call() {
    survive_every_fault(build_for_case);
}

/// Every pair of a pool and a stream has free sets, so a table of many of both would fill this
/// machine's memory.
#[test]
fn caching_refuses_more_pools_and_streams_than_any_process_has() {
    let pool =
        Pool { name: "p".to_owned(), kind: PoolKind::MemPool, no_split: false, use_on_oom: false };
    let built = |pools: usize, streams: u64| {
        let inputs = BuildInputs {
            pools: vec![pool.clone(); pools],
            stream_handles: (0..streams).collect(),
            ..BuildInputs::default()
        };
        let spec: AllocSpec = "caching".parse().expect("a name");
        Caching::build(Params::new(&spec), &inputs)
    };
    assert!(built(1000, 100).is_ok());
    let error = built(5000, 1000).expect_err("five million pairs");
    assert!(error.to_string().contains("5000 private pools"), "{error}");
}
