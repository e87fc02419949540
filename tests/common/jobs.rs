//! Jobs without any strategy, for tests that change what they are about.

use std::collections::BTreeMap;

use fraglab::workload::{
    ActivationOffload, Dtype, Hardware, Job, Optimizer, OptimizerOffload, Parallel, Recompute,
    Shape, Strategy, Train,
};

/// A job that trains this shape on one GPU of 80 GiB.
pub(crate) fn job(shape: Shape) -> Job {
    Job {
        name: "job".to_owned(),
        shape,
        train: Train {
            batch: 1,
            sequence: 128,
            steps: 2,
            dtype: Dtype::Fp16,
            autocast: None,
            optimizer: Optimizer::Adamw,
            clip: false,
            micro_batches: 1,
            seed: 0,
        },
        strategy: Strategy {
            recompute: Recompute::None,
            activation_offload: ActivationOffload::None,
            cpu_embedding: false,
            tiled_linear: false,
            optimizer_offload: OptimizerOffload::None,
            lora: None,
            zero: 0,
            zero_loads_whole: false,
        },
        parallel: Parallel { data: 1, tensor: 1, pipeline: 1, virtual_stages: 1, stage: 0 },
        lengths: None,
        expert_imbalance: 0.0,
        hardware: Hardware {
            gpu: "test".to_owned(),
            gpu_bytes: 80 << 30,
            host_bytes: 240 << 30,
            gpus_per_host: 1,
            flops: 1e14,
            memory_bytes_per_s: 1e12,
            link_bytes_per_s: 1e10,
            peer_bytes_per_s: 1e11,
        },
        options: BTreeMap::new(),
    }
}
