//! Quantities of the Kubernetes API, in thousandths of their unit.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The suffixes and their factors.
const SUFFIXES: [(&str, i128); 13] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
    ("", 1),
];
/// The API server accepts no larger exponent that a quantity could need.
const MAX_EXPONENT: u32 = 18;

/// The thousandths of a quantity, rounded up; `None` if it is not one.
pub(in crate::router) fn thousandths(quantity: &Quantity) -> Option<i128> {
    let text = quantity.0.as_str();
    let is_number = |byte: char| byte.is_ascii_digit() || matches!(byte, '.' | '+' | '-');
    let end = text.find(|byte| !is_number(byte)).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    // Numerator and denominator of the factor.
    let (times, by) = match suffix {
        "m" => (1, 1_000),
        "u" => (1, 1_000_000),
        "n" => (1, 1_000_000_000),
        _ => match SUFFIXES.iter().find(|(name, _)| *name == suffix) {
            Some((_, factor)) => (*factor, 1),
            None => exponent(suffix)?,
        },
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let is_negative = whole.starts_with('-');
    let digits = format!("{}{part}", whole.trim_start_matches(['+', '-']));
    let digits: i128 = digits.parse().ok()?;
    let scale = 10_i128.checked_pow(u32::try_from(part.len()).ok()?)?;
    let above = digits.checked_mul(times)?.checked_mul(1_000)?;
    let below = scale.checked_mul(by)?;
    let rounded = above.checked_add(below - 1)? / below;
    Some(if is_negative { -rounded } else { rounded })
}

/// The factor of a decimal exponent, such as "e3".
fn exponent(suffix: &str) -> Option<(i128, i128)> {
    let power: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let size = power.unsigned_abs();
    let factor = (size <= MAX_EXPONENT).then(|| 10_i128.pow(size))?;
    Some(if power < 0 { (1, factor) } else { (factor, 1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("1", Some(1_000)),
            ("100m", Some(100)),
            ("1.5", Some(1_500)),
            ("0.5Gi", Some(500 << 30)),
            ("2Ki", Some(2_048_000)),
            ("3k", Some(3_000_000)),
            ("2e3", Some(2_000_000)),
            ("5E-3", Some(5)),
            ("1E", Some(1_000_000_000_000_000_000_000)),
            ("100u", Some(1)),
            ("0", Some(0)),
            ("-1", Some(-1_000)),
            ("", None),
            ("Gi", None),
            ("1X", None),
            ("1.2.3", None),
            ("1e99", None),
        ] {
            assert_eq!(thousandths(&Quantity(text.into())), expected, "{text}");
        }
    }
}
