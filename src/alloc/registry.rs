//! Which allocators there are: one line each.
//!
//! The registry does not hand out trait objects. It calls a [`Visitor`] with the concrete
//! allocator, so that the replay loop is compiled once for each and dynamic dispatch is never paid.

use super::best_fit::{BestFit, FirstFit};
use super::bfc::{self, Bfc};
use super::caching::{self, Caching};
use super::native::Native;
use super::planned::{self, Planned};
use super::spec::{AllocSpec, Params, SpecError};
use super::stitch::{self, Stitch};
use super::{Allocator, BuildInputs};
use crate::workload::meant;

/// Something to do with an allocator whose type is known.
pub trait Visitor {
    /// What comes of it.
    type Output;

    /// Does it.
    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Self::Output;
}

/// What `fraglab list` says about an allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatorInfo {
    /// Name on the command line.
    pub name: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// Parameters: key and one line.
    pub params: Vec<(&'static str, &'static str)>,
}

/// Expands to [`list`] and [`build`] from one line an allocator.
macro_rules! allocators {
    ($($name:literal, $build:path, $summary:literal, $params:expr;)*) => {
        /// Every allocator.
        pub fn list() -> Vec<AllocatorInfo> {
            vec![$(AllocatorInfo { name: $name, summary: $summary, params: $params }),*]
        }

        /// Builds the allocator of a specification and gives it to the visitor.
        ///
        /// # Errors
        /// If there is no such allocator or a parameter is not accepted.
        pub fn build<V: Visitor>(
            spec: &AllocSpec,
            inputs: &BuildInputs,
            visitor: V,
        ) -> Result<V::Output, SpecError> {
            let params = Params::new(spec);
            match spec.name.as_str() {
                $($name => Ok(visitor.visit($build(params, inputs)?)),)*
                _ => Err(SpecError::UnknownAllocator {
                    name: spec.name.clone(),
                    known: list()
                        .iter()
                        .map(|info| info.name)
                        .chain(["chunk"])
                        .collect::<Vec<_>>()
                        .join(", "),
                    hint: hint(&spec.name),
                }),
            }
        }
    };
}

/// What may be meant by a name that no allocator has: a name of its origin, or an option of
/// PyTorch's allocator.
fn hint(name: &str) -> String {
    if let Some((option, value)) = name.split_once(':') {
        return format!(
            "; options of PyTorch go into --pytorch-conf {name}, or one by one into \
             caching+{option}={value}"
        );
    }
    match name.to_ascii_lowercase().as_str() {
        "patrickstar" => "; chunk is PatrickStar's manager".to_owned(),
        "gmlake" => "; stitch is GMLake".to_owned(),
        "pytorch" | "torch" => "; caching is PyTorch's".to_owned(),
        "tensorflow" | "jax" => "; bfc is TensorFlow's and JAX's".to_owned(),
        _ => meant(name, list().iter().map(|info| info.name).chain(["chunk"])),
    }
}

allocators! {
    "caching", Caching::build, "PyTorch's CUDA caching allocator, exact",
        caching::parameter_help();
    "expandable", Caching::build_expandable,
        "caching+expandable_segments=True; takes the same parameters", Vec::new();
    "best-fit", BestFit::build,
        "best fit with coalescing in one range that grows at its end: the textbook baseline",
        Vec::new();
    "first-fit", FirstFit::build, "the same, but the lowest address that fits", Vec::new();
    "bfc", Bfc::build, "the allocator of TensorFlow and JAX: best fit in regions that double",
        bfc::parameter_help();
    "native", Native::build, "one device malloc per tensor: a bound that caches nothing", Vec::new();
    "stitch", Stitch::build, "GMLake: scattered free pieces get one range of addresses",
        stitch::parameter_help();
    "planned", Planned::build, "offsets planned ahead from a profile; what differs goes on line",
        planned::parameter_help();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wants nothing of an allocator.
    struct Nothing;

    impl Visitor for Nothing {
        type Output = ();

        fn visit<A: Allocator + Send + 'static>(self, _allocator: A) {}
    }

    fn error(spec: &str) -> String {
        let spec: AllocSpec = spec.parse().expect("a specification");
        build(&spec, &BuildInputs::default(), Nothing).expect_err("unknown").to_string()
    }

    #[test]
    fn unknown_names_get_what_may_be_meant() {
        assert!(error("GMLake").ends_with("; stitch is GMLake"));
        let said = error("expandable_segments:True");
        assert!(said.contains("--pytorch-conf expandable_segments:True, or"), "{said}");
        assert!(said.ends_with(" caching+expandable_segments=True"), "{said}");
        assert!(error("PatrickStar").ends_with("; chunk is PatrickStar's manager"));
        assert!(error("cashing").ends_with("; did you mean caching?"));
        assert!(error("zzz").ends_with(", planned, chunk"), "no hint, only the names");
    }
}
