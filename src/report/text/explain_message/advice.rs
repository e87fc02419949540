//! What to do next, by what explains a message. Nothing is advised that cannot help, and nothing
//! that the text says is on already.

use crate::import::{Class, Diagnosis, IsFragmentation, OomMessage, Wording};
use crate::units::Bytes;

/// Advice, one paragraph each, the best first; at most three.
pub(super) fn advice(message: &OomMessage, diagnosis: &Diagnosis) -> Vec<String> {
    match diagnosis.class {
        Class::NotFragmentation => vec![no_setting(diagnosis), need_less(diagnosis)],
        Class::Outside if message.wording == Wording::Mps => vec![mps_others(), mps_limit()],
        Class::Outside => vec![outside(), no_setting(diagnosis)],
        Class::NearMiss => near_miss(message, diagnosis),
        Class::Fragmentation | Class::Partly => vec![expandable(message), record()],
        Class::PrivatePool => vec![private_pools(), record()],
        Class::Limit if message.wording == Wording::Mps => vec![mps_limit(), need_less(diagnosis)],
        Class::Limit => limit(diagnosis, message),
        Class::Driver => driver(message),
        Class::DriverPool => vec![driver_pool(), others_first()],
        Class::LargerThanDevice => vec![larger()],
        Class::Oversubscribed => vec![oversubscribed(), need_less(diagnosis)],
        Class::Undecided => vec![record()],
        Class::Unknown => unknown(message),
    }
}

fn no_setting(diagnosis: &Diagnosis) -> String {
    let reach =
        if diagnosis.missing_bytes.is_some_and(|missing| missing > 0) { "" } else { " for long" };
    format!(
        "No setting of the allocator helps{reach}: max_split_size_mb, expandable_segments and \
         garbage_collection_threshold only move what is stranded."
    )
}

fn need_less(diagnosis: &Diagnosis) -> String {
    let text = "Need less at once: a smaller batch or sequence, recomputation of activations, \
                sharded or offloaded optimizer states, a smaller type.";
    match diagnosis.capacity_needed_bytes {
        Some(bytes) => format!(
            "{text} With everything else as it was, a device of {} would have met this request.",
            Bytes(bytes)
        ),
        None => text.to_owned(),
    }
}

fn outside() -> String {
    "Look who else is on the device (nvidia-smi, rocm-smi): other processes, a desktop, a server \
     of the same job, libraries in this process (NCCL, cuDNN). Their memory is what is missing."
        .to_owned()
}

fn others_first() -> String {
    "First make sure that nobody else is on the device (nvidia-smi): the message does not tell."
        .to_owned()
}

fn near_miss(message: &OomMessage, diagnosis: &Diagnosis) -> Vec<String> {
    if diagnosis.is_fragmentation == IsFragmentation::Yes {
        return vec![expandable(message), record()];
    }
    let text = "A few MiB less anywhere let this request through; the next one may fail all the \
                same. Lower the batch or the share of the device that is filled in advance a \
                little.";
    vec![text.to_owned()]
}

/// The setting that lets free memory beside live blocks serve any request.
fn expandable(message: &OomMessage) -> String {
    if message.names_expandable_segments {
        return "expandable_segments:True is named in this text. If it was in force, it has done \
                what it can: see with a snapshot which blocks are in the way. If it was set after \
                torch was imported, it was not in force."
            .to_owned();
    }
    let variable = match message.device_kind {
        Some("NPU") => "PYTORCH_NPU_ALLOC_CONF",
        Some("HIP") => "PYTORCH_HIP_ALLOC_CONF",
        Some("CUDA") | None => "PYTORCH_CUDA_ALLOC_CONF",
        Some(_) => "PYTORCH_ALLOC_CONF",
    };
    let since = match message.wording {
        Wording::TorchUnallocated => "",
        _ => " (PyTorch 2.1 and later)",
    };
    format!(
        "Set {variable}=expandable_segments:True before torch is imported{since}: memory then \
         comes in small pages, and those that are free serve any request. Not on Windows; not with \
         memory shared between processes or vLLM's sleep mode."
    )
}

fn record() -> String {
    "See what pins it: torch.cuda.memory._record_memory_history() at the start, \
     torch.cuda.memory._dump_snapshot(\"snapshot.pickle\") when it fails, then \
     `fraglab explain snapshot.pickle`."
        .to_owned()
}

fn private_pools() -> String {
    "Memory in private pools serves only the CUDA graphs or the MemPool that own them: capture \
     fewer graphs (fewer batch sizes), let graphs share one pool, or run without them."
        .to_owned()
}

fn limit(diagnosis: &Diagnosis, message: &OomMessage) -> Vec<String> {
    let mut all = vec![
        "Raise the limit: torch.cuda.set_per_process_memory_fraction or \
         per_process_memory_fraction in the settings, or what a framework derives them from."
            .to_owned(),
    ];
    if diagnosis.is_fragmentation == IsFragmentation::Partly {
        all.push(expandable(message));
        all.push(record());
    }
    all
}

fn driver(message: &OomMessage) -> Vec<String> {
    if message.is_block_limit {
        return vec![
            "The platform has a largest block, whatever is free: split the tensor (chunks of the \
             attention or of the loss), or use a device or driver without this limit."
                .to_owned(),
        ];
    }
    vec![
        "The allocator had nothing to decide: it asked for less than was free. Look for a process \
         that took memory at that moment, for a limit of a container, MIG or vGPU slice, for \
         Windows' and WSL's share of the device, and at the driver's log."
            .to_owned(),
        "Reproduce it alone on the device: torch.empty of this size in a fresh process. If that \
         fails too, it is the driver or the platform."
            .to_owned(),
    ]
}

fn driver_pool() -> String {
    "What the driver's pool holds beside live memory is not told. Run once with \
     backend:native: its message says what is stranded, and its snapshot why."
        .to_owned()
}

fn larger() -> String {
    "No device of this kind can serve it. Look at the shape: an attention matrix without flash \
     attention, a mask or a loss over all positions, a batch that was not split."
        .to_owned()
}

fn oversubscribed() -> String {
    "Windows lends a program memory of the host when the device is full, and it becomes slow; here \
     even that came to its end. What counts is what the device itself has."
        .to_owned()
}

fn mps_limit() -> String {
    "PyTorch stops at a share of the memory that Metal recommends. \
     PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit; the machine may then swap or stall."
        .to_owned()
}

fn mps_others() -> String {
    "More than PyTorch's tensors is allocated outside its allocator in this process (Metal's own \
     caches and graphs, other libraries): torch.mps.empty_cache(), or fewer different shapes."
        .to_owned()
}

fn unknown(message: &OomMessage) -> Vec<String> {
    let text = match message.wording {
        Wording::TorchHost => {
            "Load in parts or with memory mapping, use fewer worker processes, or give the machine \
             more memory or swap."
        }
        Wording::Jax => {
            "JAX reserves 75 % of the device at the start and does not tell here what was free. \
             XLA_PYTHON_CLIENT_MEM_FRACTION=.9 gives it more, \
             XLA_PYTHON_CLIENT_ALLOCATOR=platform shows whether its pool is the reason."
        }
        Wording::TensorFlow => {
            "TensorFlow lists its chunks below this line: `Sum Total of in-use chunks` against \
             `Limit` tells whether memory is short or in pieces."
        }
        Wording::Rmm if message.is_pool_full => {
            "The pool has reached its maximum, or no hole in it is large enough: the message does \
             not tell which. Log with rmm.enable_logging and give the CSV to fraglab."
        }
        Wording::Rmm => {
            "The device had no more for RMM. Log with rmm.enable_logging and give the CSV to \
             fraglab: it tells live memory from holes."
        }
        Wording::Driver => {
            "Only that the driver refused, without figures: the allocation was not PyTorch's own \
             (a library, a context, pinned memory), or the message is cut. Paste all of it."
        }
        _ => "Paste the whole message: the figures behind `Tried to allocate` are missing.",
    };
    vec![text.to_owned()]
}
