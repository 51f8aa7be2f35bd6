//! Sizes in bytes, and the capacity range of a request.

use std::fmt;

use crate::error::Error;

/// One KiB.
pub const KIB: u64 = 1 << 10;
/// One MiB.
pub const MIB: u64 = 1 << 20;
/// One GiB; also the size of a volume if the request does not set one.
pub const GIB: u64 = 1 << 30;

/// The length of an image file is a multiple of this, so that a loop device of any block size shows
/// all of it.
pub const GRAIN: u64 = 4 * KIB;

/// A pool with less free space than this is nearly full: the health of its volumes, the status page, the
/// cache of data sources and the alert of the chart agree on it.
pub const LOW_SPACE_PERCENT: u64 = 5;

/// Whether a pool is nearly full.
pub fn is_low_space(available: u64, total: u64) -> bool {
    available < total / (100 / LOW_SPACE_PERCENT)
}

/// Upper limit of an image's size, which only prevents arithmetic overflow: with 4 KiB blocks,
/// files on xfs can have almost 8 EiB, and on ext4 almost 16 TiB, beyond which the kernel returns
/// EFBIG.
pub const MAX: u64 = 1 << 62;

/// Length of an image file that shows at least `size` bytes.
pub fn image_bytes(size: u64) -> u64 {
    size.div_ceil(GRAIN).saturating_mul(GRAIN)
}

/// The requested range: at least `required`, at most `limit`; 0 means "not set" for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapacityRange {
    /// At least this many bytes.
    pub required: u64,
    /// At most this many bytes.
    pub limit: u64,
}

impl CapacityRange {
    /// Converts the signed numbers of the protocol.
    pub fn new(required: i64, limit: i64) -> Result<CapacityRange, Error> {
        let unsigned = |field: &str, value: i64| {
            u64::try_from(value).map_err(|_| {
                Error::invalid(
                    field,
                    format!("{value} is negative; give a number of bytes"),
                )
            })
        };
        let required = unsigned("capacity_range.required_bytes", required)?;
        let limit = unsigned("capacity_range.limit_bytes", limit)?;
        if limit != 0 && required > limit {
            return Err(Error::invalid(
                "capacity_range",
                format!("required_bytes {required} is above limit_bytes {limit}"),
            ));
        }
        if required > MAX {
            return Err(Error::OutOfRange {
                field: "capacity_range.required_bytes".into(),
                problem: format!("{required} is more than a pool can hold; at most {MAX}"),
            });
        }
        Ok(CapacityRange { required, limit })
    }

    /// Whether a size lies within the range.
    pub fn admits(&self, size: u64) -> bool {
        size >= self.required && (self.limit == 0 || size <= self.limit)
    }

    /// The size to create: the requested size, raised to `minimum` if the limit permits it.
    pub fn resolve(&self, minimum: u64) -> Result<u64, Error> {
        let wished = if self.required == 0 {
            if self.limit == 0 {
                GIB
            } else {
                GIB.min(self.limit)
            }
        } else {
            self.required
        };
        let size = wished.max(minimum);
        if self.limit != 0 && size > self.limit {
            return Err(Error::OutOfRange {
                field: "capacity_range.limit_bytes".into(),
                problem: format!(
                    "{} is below the {minimum} bytes that this kind of volume needs",
                    self.limit
                ),
            });
        }
        Ok(size)
    }
}

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a size; give a number of bytes, or one with Ki, Mi, Gi, Ti (1024) or k, M, G, T (1000)"
)]
pub struct NotASize(pub String);

/// Parses `200Gi`, `1500M`, `4096`.
pub fn parse_size(text: &str) -> Result<u64, NotASize> {
    let bad = || NotASize(text.to_string());
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit {
        "" => 1,
        "Ki" => KIB,
        "Mi" => MIB,
        "Gi" => GIB,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => 1_000_000_000_000_000,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number
        .checked_mul(factor)
        .filter(|bytes| *bytes <= MAX)
        .ok_or_else(bad)
}

/// A number of bytes in readable form: `1.5 GiB`.
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 || value.fract() == 0.0 {
            write!(f, "{value:.0} {}", UNITS[unit])
        } else {
            write!(f, "{value:.1} {}", UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_resolved_size_is_always_admitted(required in 0i64.., limit in 0i64.., minimum in 0u64..1 << 40) {
            if let Ok(range) = CapacityRange::new(required, limit)
                && let Ok(size) = range.resolve(minimum)
            {
                prop_assert!(range.admits(size));
                prop_assert!(size >= minimum);
                prop_assert!(required == 0 || size == range.required.max(minimum), "sizes are reported as asked for");
            }
        }

        #[test]
        fn an_image_is_the_smallest_multiple_that_holds_the_size(size in 0..MAX) {
            let image = image_bytes(size);
            prop_assert!(image >= size && image - size < GRAIN && image.is_multiple_of(GRAIN));
        }

        #[test]
        fn any_numbers_are_handled_without_a_panic(required: i64, limit: i64) {
            let _ = CapacityRange::new(required, limit).map(|range| range.resolve(0));
        }

        #[test]
        fn a_size_with_a_unit_is_its_product(n in 0u64..1 << 20, (unit, factor) in prop_oneof![Just(("Ki", KIB)), Just(("Mi", MIB)), Just(("Gi", GIB)), Just(("M", 1_000_000)), Just(("", 1))]) {
            prop_assert_eq!(parse_size(&format!("{n}{unit}")), Ok(n * factor));
        }

        #[test]
        fn any_text_as_size_is_parsed_without_a_panic(text in any::<String>()) {
            let _ = parse_size(&text);
        }
    }

    #[test]
    fn a_size_is_formatted_for_readers() {
        assert_eq!(HumanBytes(0).to_string(), "0 B");
        assert_eq!(HumanBytes(1536).to_string(), "1.5 KiB");
        assert_eq!(HumanBytes(GIB).to_string(), "1 GiB");
    }
}
