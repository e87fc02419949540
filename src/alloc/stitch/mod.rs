//! GMLake: physical memory in chunks of 2 MiB that may have several addresses, so that scattered
//! free pieces serve one large request (specs/gmlake.md).
//!
//! A large segment is a range of addresses with a chunk behind every 2 MiB. It is cut into
//! *primitive* blocks, as PyTorch cuts its segments. A *stitched* block is a second range of
//! addresses over chunks of several primitive blocks. Freed, it keeps its range: when its chunks
//! are free again, it is handed out once more without any device call.
//!
//! ```text
//!   addresses    segment 1                segment 2           stitched block
//!                ┌────┬─────────┬────┐    ┌───────┬──────┐    ┌───────┬─────────┐
//!   primitive    │ A  │ free    │ B  │    │ free  │ C    │    │ D             │
//!                └────┴────┬────┴────┘    └───┬───┴──────┘    └───┬───┴────┬────┘
//!                          └──────────────────│───────────────────│────────┘
//!   chunks       a a  s s s s s  b b          t t t  c c c        t t t  s s s s s
//! ```
//!
//! A chunk belongs to one primitive block and any number of stitched ones. D makes the primitive
//! blocks behind it busy; while any chunk of a stitched block is busy, it cannot be handed out.
//!
//! The one design decision: a stitched block is a list of runs of chunks and nothing else. What is
//! busy is one row of bits for all chunks, so that handing out a primitive block of 1 GiB sets 8
//! words, whoever has stitched it; whether a stitched block is free is looked up when it is wanted
//! (`chunks.rs`). The counters and pools of the published code (spec 1.1, 1.3) say the same at
//! every moment, but have to be kept at every event.
//!
//! # Policies
//!
//! - `paper` (`paper.rs`), as published: exact size first, then one larger block, then several
//!   smaller, then those and new memory for what is missing.
//! - `shipped` (`shipped.rs`), as the code does it: the smallest primitive block, then a stitched
//!   block of up to ten times the size in part, then stitching, then new memory in full.
//!
//! Small requests are served from 2 MiB device mallocs, as PyTorch does, under both.
//!
//! What decides how much stitching saves is not the limit but the fourth step of `paper`: reserved
//! peaks in MiB of recorded jobs, all limits at their defaults unless said.
//!
//! ```text
//!                              requested  caching  paper  shipped  shipped, 32 MiB  re_alloc
//!   deepspeed-opt-1-3b-LR          37230    45508  37984    45508            45458     37954
//!   deepspeed-opt-1-3b-R           45857    60158  48092    50732            50468     48232
//!   llama-1b-varlen                48929    74438  60356    56042            49364         -
//!   opt-1-3b-recompute-offload     24756    29482  25050    29472            29300     24762
//! ```
//!
//! # Where this differs from the published code
//!
//! Defects of spec 4.3 are mended. A flush keeps a free primitive block whose chunks a stitched
//! block in use also has (B4): as long as they are mapped there, the device would not get them
//! back, so they stay cached and usable, and reserved. What the device does not take back stays as
//! it is and is given again later. The settings string of a recording is not taken over: it belongs
//! to another allocator. Private pools (B12) are ignored: there is one pool a stream and kind.
//! Events count as complete when they are asked for (spec 3.6).

mod best;
mod blocks;
mod check;
mod chunks;
mod config;
mod gmlake;
mod idle;
mod paper;
mod segments;
mod shipped;
mod stitched;
#[cfg(test)]
mod tests;

use super::spec::{Params, SpecError};
use super::{Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels, OutOfMemory, Request};
use crate::units::{Bytes, ParseBytesError, StreamId};
use best::Best;
use chunks::CHUNK_BYTES;
use config::Policy;
use gmlake::Gmlake;

/// Name of the policy of our own.
const BEST: &str = "best";

/// The allocator that is registered: one of several that stitch.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one a replay, called at every event")]
pub enum Stitch {
    /// GMLake, as published or as shipped.
    Gmlake(Gmlake),
    /// Our own.
    Best(Best),
}

/// What `fraglab list` says about the parameters.
pub(super) fn parameter_help() -> Vec<(&'static str, &'static str)> {
    let policy = (
        "policy",
        "paper: GMLake's published algorithm (default); shipped: its published code; best: our own",
    );
    [vec![policy], config::help(), best::help()].concat()
}

impl Stitch {
    /// Builds the allocator; `policy` says which.
    ///
    /// # Errors
    /// A value that is not accepted, and a parameter that the policy does not know.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Stitch, SpecError> {
        let policy = params.take("policy").unwrap_or_else(|| Policy::Paper.name().to_owned());
        let gmlake = [Policy::Paper, Policy::Shipped].into_iter().find(|it| it.name() == policy);
        if gmlake.is_none() && policy != BEST {
            let message = format!("policy={policy}: expected paper, shipped or best");
            return Err(params.value_error(message));
        }
        refuse_foreign(&params, &policy)?;
        Ok(match gmlake {
            Some(policy) => Stitch::Gmlake(Gmlake::build(params, inputs, policy)?),
            None => Stitch::Best(Best::build(params, inputs)?),
        })
    }
}

/// Refuses parameters that only other policies know.
fn refuse_foreign(params: &Params, policy: &str) -> Result<(), SpecError> {
    let of_best = best::help().into_iter().map(|(key, _)| (key, vec![BEST]));
    let mut foreign = config::known_by()
        .chain(of_best)
        .filter(|(key, policies)| params.has(key) && !policies.contains(&policy));
    let Some((key, policies)) = foreign.next() else { return Ok(()) };
    let policies = policies.join(" or ");
    Err(params.value_error(format!("{key} needs policy={policies}, this is policy={policy}")))
}

/// A size as a parameter, in bytes. Without a unit it is bytes; none but 0 is smaller than a chunk,
/// and whoever writes 128 means something else.
///
/// # Errors
/// What was expected.
fn parse_size(text: &str) -> Result<u64, String> {
    let Bytes(bytes) = text.parse().map_err(|error: ParseBytesError| error.to_string())?;
    let has_unit = text.contains(|c: char| c.is_ascii_alphabetic());
    if !has_unit && (1..CHUNK_BYTES).contains(&bytes) {
        return Err(format!("{bytes} bytes are less than a chunk: give a unit, as in 128MiB"));
    }
    Ok(bytes)
}

/// The same call of whichever allocator it is.
macro_rules! delegate {
    ($stitch:expr, $inner:ident => $call:expr) => {
        match $stitch {
            Stitch::Gmlake($inner) => $call,
            Stitch::Best($inner) => $call,
        }
    };
}

impl Allocator for Stitch {
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        delegate!(self, inner => inner.malloc(env, request))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        delegate!(self, inner => inner.free(env, handle))
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        delegate!(self, inner => inner.defer(env, handle))
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        delegate!(self, inner => inner.empty_cache(env))
    }

    fn stream_added(&mut self, stream: StreamId, handle: u64) {
        // Our own policy makes an arena when a stream first asks.
        if let Stitch::Gmlake(gmlake) = self {
            gmlake.add_stream(stream, handle);
        }
    }

    #[inline]
    fn levels(&self) -> Levels {
        delegate!(self, inner => inner.levels())
    }

    fn pool_of(&self, request: Request) -> u32 {
        delegate!(self, inner => inner.pool_of(request))
    }

    fn pool_name(&self, pool: u32) -> Option<String> {
        delegate!(self, inner => inner.pool_name(pool))
    }

    fn largest_hole(&self, request: Request) -> u64 {
        delegate!(self, inner => inner.largest_hole(request))
    }

    fn limit_bytes(&self) -> Option<u64> {
        delegate!(self, inner => inner.limit_bytes())
    }

    fn check_invariants(&self) -> Result<(), String> {
        delegate!(self, inner => inner.check_invariants())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        delegate!(self, inner => inner.counters())
    }

    fn params(&self) -> Vec<(String, String)> {
        delegate!(self, inner => inner.params())
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        delegate!(self, inner => inner.layout(visit))
    }
}
