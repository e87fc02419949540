//! Values of any type: numbers as they come, texts into buffers, everything else read over.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The numbers of a memory event.
#[derive(Default)]
pub(super) struct Args {
    pub(super) address: Scalar,
    pub(super) bytes: Scalar,
    pub(super) device_kind: Scalar,
    pub(super) device_index: Scalar,
    pub(super) allocated_bytes: Scalar,
    pub(super) reserved_bytes: Scalar,
    pub(super) index: Scalar,
}

/// Keys of a memory event's arguments.
#[derive(Deserialize)]
#[serde(field_identifier)]
enum ArgKey {
    #[serde(rename = "Addr")]
    Address,
    Bytes,
    #[serde(rename = "Device Type")]
    DeviceKind,
    #[serde(rename = "Device Id")]
    DeviceIndex,
    #[serde(rename = "Total Allocated")]
    AllocatedBytes,
    #[serde(rename = "Total Reserved")]
    ReservedBytes,
    #[serde(rename = "Ev Idx")]
    Index,
    #[serde(other)]
    Other,
}

/// A GPU of the machine, as far as the file tells.
#[derive(Debug, Default)]
pub(super) struct DeviceProperties {
    pub(super) id: Scalar,
    /// Empty if it is not told.
    pub(super) name: String,
    pub(super) total_bytes: Scalar,
}

/// Keys of a GPU's properties.
#[derive(Deserialize)]
#[serde(field_identifier)]
enum PropertyKey {
    #[serde(rename = "id")]
    Id,
    #[serde(rename = "name")]
    Name,
    #[serde(rename = "totalGlobalMem")]
    TotalBytes,
    #[serde(other)]
    Other,
}

/// A number, or something that is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Scalar {
    Unsigned(u64),
    Negative(i64),
    Fraction(f64),
    #[default]
    Other,
}

impl Scalar {
    /// A whole number.
    pub(super) fn whole(self) -> Option<i64> {
        match self {
            Scalar::Unsigned(number) => i64::try_from(number).ok(),
            Scalar::Negative(number) => Some(number),
            Scalar::Fraction(_) | Scalar::Other => None,
        }
    }

    pub(super) fn small(self) -> Option<i32> {
        i32::try_from(self.whole()?).ok()
    }

    /// A whole number of 0 or more.
    pub(super) fn count(self) -> Option<u64> {
        u64::try_from(self.whole()?).ok()
    }

    /// 64 bits, which some writers print with a sign.
    pub(super) fn bits(self) -> Option<u64> {
        match self {
            Scalar::Unsigned(number) => Some(number),
            Scalar::Negative(number) => Some(number as u64),
            Scalar::Fraction(_) | Scalar::Other => None,
        }
    }

    /// Microseconds, mostly with three decimals, in nanoseconds. A double holds them exactly for
    /// the first 104 days of a clock.
    pub(super) fn microseconds_in_ns(self) -> Option<i64> {
        match self {
            Scalar::Unsigned(us) => i64::try_from(us).ok()?.checked_mul(1000),
            Scalar::Negative(us) => us.checked_mul(1000),
            // The conversion saturates; half of the range is left for differences.
            Scalar::Fraction(us) => {
                Some(((us * 1000.0).round() as i64).clamp(i64::MIN / 2, i64::MAX / 2))
            }
            Scalar::Other => None,
        }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(Value::default())
    }
}

/// Takes any value: a number becomes a [`Scalar`], and what is of the right type goes to the place
/// named here. Everything else is read over, so a file with odd types in it can still be read.
#[derive(Default)]
pub(super) enum Value<'a> {
    /// No place.
    #[default]
    Over,
    /// For a text.
    Text(&'a mut String),
    /// For an object's numbers.
    Args(&'a mut Args),
    /// For a list of GPUs; those without a number are left out.
    Devices(&'a mut Vec<DeviceProperties>),
    /// For one of them.
    Device(&'a mut DeviceProperties),
}

impl<'a> Value<'a> {
    /// Puts a text into a buffer that is there already.
    pub(super) fn text(buffer: &'a mut String) -> Value<'a> {
        buffer.clear();
        Value::Text(buffer)
    }
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = Scalar;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Scalar, E> {
        Ok(Scalar::Unsigned(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Scalar, E> {
        Ok(u64::try_from(number).map_or(Scalar::Negative(number), Scalar::Unsigned))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Scalar, E> {
        Ok(Scalar::Fraction(number))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
        if let Value::Text(buffer) = self {
            buffer.push_str(text);
        }
        Ok(Scalar::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        let Value::Devices(devices) = self else {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Scalar::Other);
        };
        loop {
            let mut device = DeviceProperties::default();
            if seq.next_element_seed(Value::Device(&mut device))?.is_none() {
                return Ok(Scalar::Other);
            }
            if device.id != Scalar::Other {
                devices.push(device);
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        match self {
            Value::Args(args) => args.read(map)?,
            Value::Device(device) => device.read(map)?,
            _ => while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {},
        }
        Ok(Scalar::Other)
    }
}

impl Args {
    fn read<'de, A: MapAccess<'de>>(&mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<ArgKey>()? {
            let place = match key {
                ArgKey::Address => &mut self.address,
                ArgKey::Bytes => &mut self.bytes,
                ArgKey::DeviceKind => &mut self.device_kind,
                ArgKey::DeviceIndex => &mut self.device_index,
                ArgKey::AllocatedBytes => &mut self.allocated_bytes,
                ArgKey::ReservedBytes => &mut self.reserved_bytes,
                ArgKey::Index => &mut self.index,
                ArgKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *place = map.next_value()?;
        }
        Ok(())
    }
}

impl DeviceProperties {
    fn read<'de, A: MapAccess<'de>>(&mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<PropertyKey>()? {
            match key {
                PropertyKey::Id => self.id = map.next_value()?,
                PropertyKey::Name => drop(map.next_value_seed(Value::text(&mut self.name))?),
                PropertyKey::TotalBytes => self.total_bytes = map.next_value()?,
                PropertyKey::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}
