//! Which parameter lies where in which chunk (spec patrickstar 1.4).
//!
//! The one design decision: the layout is that of the fp16 list alone. The lists of fp32
//! parameters, momentum and variance have the same one, chunk by chunk.
//!
//! A module's own parameters stay together. They go behind the last ones if they fit into the last
//! chunk, else to the start of a new one; no earlier chunk is looked at again, nothing is aligned:
//!
//! ```text
//!   chunk 0                      chunk 1                      chunk 2
//!   ├ embedding ┼ q ┼ k ┤░░░░░░░┤├ v ┼ o ┼ norm ┼ up ┤░░░░░░░┤├ down ┼ norm ┤
//!                        └ `v` did not fit: the tail is wasted
//! ```

use crate::trace::ModelUnit;

/// Elements that chunk sizes are counted in: 2^20.
pub const MI: u64 = 1 << 20;

/// Where every parameter of a model lies. Units on the host lie nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements of each chunk.
    pub chunk_elements: u64,
    /// The chunks in the order in which they were opened.
    pub chunks: Vec<ChunkLayout>,
}

/// What lies in a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkLayout {
    /// Parameters by offset, without gaps.
    pub tensors: Vec<PlacedTensor>,
    /// End of the last one.
    pub used_elements: u64,
}

/// A parameter in its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedTensor {
    /// Index of its unit in [`Model::units`](crate::trace::Model::units).
    pub unit: u32,
    /// Index of the parameter in the unit.
    pub parameter: u32,
    /// Where in the chunk it begins.
    pub offset_elements: u64,
    /// How long it is.
    pub elements: u64,
}

/// Why a model cannot be put into chunks of a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Chunks of no elements.
    #[error("a chunk of 0 elements holds nothing: expected 1 or more")]
    Empty,
    /// A module whose parameters do not fit into an empty chunk.
    #[error(
        "module `{module}` has {elements} elements, which must lie in one chunk of {chunk_elements}: \
         this model needs chunks of at least {smallest_elements} elements ({smallest_mi}Mi)",
        smallest_mi = smallest_elements.div_ceil(MI)
    )]
    TooLarge {
        /// The first such module.
        module: String,
        /// Elements of its own parameters together.
        elements: u64,
        /// Elements of a chunk.
        chunk_elements: u64,
        /// Elements of the model's largest module: the smallest chunk that would do.
        smallest_elements: u64,
    },
}

/// Puts the parameters of all units that are not on the host into chunks, in order.
///
/// # Errors
///
/// A unit that is larger than a chunk, or chunks of size 0.
pub fn pack(units: &[ModelUnit], chunk_elements: u64) -> Result<Layout, LayoutError> {
    let mut cursor = Cursor::new(chunk_elements)?;
    let mut chunks: Vec<ChunkLayout> = Vec::new();
    for (index, unit) in units.iter().enumerate().filter(|(_, unit)| !unit.host) {
        let too_large = || LayoutError::TooLarge {
            module: unit.module.clone(),
            elements: unit.elements(),
            chunk_elements,
            smallest_elements: smallest_chunk_elements(units),
        };
        cursor.place(unit.elements()).ok_or_else(too_large)?;
        chunks.resize_with(cursor.chunks, ChunkLayout::default);
        if let Some(chunk) = chunks.last_mut() {
            chunk.append(index as u32, unit);
        }
    }
    Ok(Layout { chunk_elements, chunks })
}

/// Elements of the smallest chunks that hold this model: those of its largest unit; 0 if all are
/// on the host.
pub fn smallest_chunk_elements(units: &[ModelUnit]) -> u64 {
    let chunked = units.iter().filter(|unit| !unit.host);
    chunked.map(ModelUnit::elements).max().unwrap_or(0)
}

impl Layout {
    /// Elements of all parameters.
    pub fn used_elements(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.used_elements).fold(0, u64::saturating_add)
    }

    /// Mean share of a chunk that holds parameters, the last one's tail included (spec patrickstar
    /// 1.5); 1 if there is no chunk.
    pub fn utilization(&self) -> f64 {
        utilization(self.used_elements(), self.chunks.len() as u64, self.chunk_elements)
    }

    /// Empty chunks that make their number a multiple of `ranks` (spec patrickstar 4.1).
    pub fn dummies(&self, ranks: u32) -> u64 {
        dummies(self.chunks.len() as u64, ranks)
    }
}

impl ChunkLayout {
    fn append(&mut self, index: u32, unit: &ModelUnit) {
        for (parameter, tensor) in unit.parameters.iter().enumerate() {
            self.tensors.push(PlacedTensor {
                unit: index,
                parameter: parameter as u32,
                offset_elements: self.used_elements,
                elements: tensor.elements,
            });
            self.used_elements = self.used_elements.saturating_add(tensor.elements);
        }
    }
}

/// Mean share of equal chunks that is used.
pub(super) fn utilization(used_elements: u64, chunks: u64, chunk_elements: u64) -> f64 {
    if chunks == 0 {
        return 1.0;
    }
    used_elements as f64 / (chunks as f64 * chunk_elements as f64)
}

/// Chunks that are missing to a multiple of `ranks`.
pub(super) fn dummies(chunks: u64, ranks: u32) -> u64 {
    let ranks = u64::from(ranks.max(1));
    (ranks - chunks % ranks) % ranks
}

/// The rule of packing by itself: how many chunks are open, and what is free in the last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    chunk_elements: u64,
    free_elements: u64,
    /// Chunks opened so far.
    pub(super) chunks: usize,
}

impl Cursor {
    /// No chunk is open.
    pub(super) fn new(chunk_elements: u64) -> Result<Self, LayoutError> {
        if chunk_elements == 0 {
            return Err(LayoutError::Empty);
        }
        Ok(Cursor { chunk_elements, free_elements: 0, chunks: 0 })
    }

    /// Puts a unit into the last chunk or a new one; nothing if it is larger than a chunk.
    pub(super) fn place(&mut self, elements: u64) -> Option<()> {
        if elements > self.free_elements {
            self.free_elements = self.chunk_elements.checked_sub(elements)?;
            self.chunks += 1;
        } else {
            self.free_elements -= elements;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::ModelParameter;

    fn unit(module: &str, elements: &[u64]) -> ModelUnit {
        let parameter = |(index, &elements): (usize, &u64)| ModelParameter {
            name: format!("{module}.{index}"),
            elements,
            frozen: false,
        };
        let parameters = elements.iter().enumerate().map(parameter).collect();
        ModelUnit { module: module.to_owned(), parameters, ..ModelUnit::default() }
    }

    /// Spec patrickstar 8.4 A: chunks of 100; the last module shares the sixth.
    #[test]
    fn a_unit_stays_whole_and_only_the_last_chunk_is_tried() {
        let mut units = vec![unit("emb", &[60])];
        units.extend((0..5).map(|layer| unit(&format!("l{layer}"), &[50, 10])));
        units.push(unit("head", &[30]));
        let layout = pack(&units, 100).unwrap();
        let used: Vec<u64> = layout.chunks.iter().map(|chunk| chunk.used_elements).collect();
        assert_eq!(used, [60, 60, 60, 60, 60, 90]);
        let placed = |unit, parameter, offset_elements, elements| PlacedTensor {
            unit,
            parameter,
            offset_elements,
            elements,
        };
        assert_eq!(
            layout.chunks[5].tensors,
            [placed(5, 0, 0, 50), placed(5, 1, 50, 10), placed(6, 0, 60, 30)]
        );
        assert_eq!(layout.utilization(), 390.0 / 600.0);
        assert_eq!([1, 2, 4, 6, 8].map(|ranks| layout.dummies(ranks)), [0, 0, 2, 0, 2]);
    }

    #[test]
    fn a_chunk_may_be_filled_to_its_end() {
        let units = [unit("a", &[60]), unit("b", &[40]), unit("c", &[100]), unit("d", &[1])];
        let layout = pack(&units, 100).unwrap();
        assert_eq!(layout.chunks.len(), 3);
        assert_eq!(layout.used_elements(), 201);
    }

    #[test]
    fn units_on_the_host_lie_in_no_chunk() {
        let mut units = vec![unit("table", &[1000]), unit("a", &[5])];
        units[0].host = true;
        let layout = pack(&units, 10).unwrap();
        assert_eq!(layout.chunks.len(), 1);
        assert_eq!(layout.chunks[0].tensors[0].unit, 1);
        assert_eq!(pack(&units[..1], 10).unwrap().utilization(), 1.0);
    }

    #[test]
    fn what_does_not_fit_is_named_with_the_size_that_would_do() {
        let units = [unit("a", &[5]), unit("b", &[MI, 1]), unit("c", &[2 * MI + 1])];
        let error = pack(&units, MI).unwrap_err();
        assert_eq!(
            error,
            LayoutError::TooLarge {
                module: "b".to_owned(),
                elements: MI + 1,
                chunk_elements: MI,
                smallest_elements: 2 * MI + 1,
            }
        );
        assert_eq!(
            error.to_string(),
            "module `b` has 1048577 elements, which must lie in one chunk of 1048576: this model \
             needs chunks of at least 2097153 elements (3Mi)"
        );
        assert_eq!(pack(&units, 0), Err(LayoutError::Empty));
        assert!(pack(&units, 2 * MI + 1).is_ok());
    }

    #[test]
    fn a_unit_of_more_elements_than_64_bits_hold_fits_nowhere() {
        let units = [unit("a", &[u64::MAX, u64::MAX])];
        assert!(pack(&units, u64::MAX - 1).is_err());
    }
}
