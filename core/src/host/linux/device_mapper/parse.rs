//! What the device mapper answers, and the tables that it reads.

use super::from_kernel;

/// The size of `struct dm_target_spec`. The parameters follow it.
const SPEC: usize = 40;
/// The size of the type in it.
const TYPE: usize = 16;

/// One line of a table, or of the status of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The first sector of 512 bytes.
    pub start: u64,
    /// The number of sectors of 512 bytes.
    pub sectors: u64,
    /// The type of the target, such as `thin`.
    pub kind: String,
    /// The parameters in a table, the rest of the line in a status.
    pub parameters: String,
}

/// A device in the list of all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The device number, as st_rdev has it.
    pub rdev: u64,
    pub name: String,
    /// Empty if it has none; `None` if the kernel does not list UUIDs.
    pub uuid: Option<String>,
}

impl Target {
    /// The form in which a table is loaded. Its length is a multiple of 8.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let length = (SPEC + self.parameters.len() + 1).next_multiple_of(8);
        let mut kind = [0; TYPE];
        // A zero must remain at the end; a type that is too long becomes one that does not exist.
        for (to, from) in kind[..TYPE - 1].iter_mut().zip(self.kind.bytes()) {
            *to = from;
        }
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(self.start.to_ne_bytes());
        bytes.extend(self.sectors.to_ne_bytes());
        bytes.extend(0i32.to_ne_bytes());
        bytes.extend((length as u32).to_ne_bytes());
        bytes.extend(kind);
        bytes.extend(self.parameters.bytes());
        bytes.resize(length, 0);
        bytes
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

/// A text that ends with a zero, or with its field. A text that is not UTF-8 is empty.
pub(super) fn text(bytes: &[u8], at: usize, size: usize) -> &str {
    let field = bytes.get(at..at + size).unwrap_or_default();
    let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(text).unwrap_or_default()
}

/// A text that ends with a zero.
fn long_text(bytes: &[u8], at: usize) -> Option<String> {
    let rest = bytes.get(at..)?;
    let length = rest.iter().position(|byte| *byte == 0)?;
    String::from_utf8(rest[..length].to_vec()).ok()
}

/// The lines of a table or of a status; `None` if the kernel's answer is not understood.
pub(super) fn targets(bytes: &[u8], count: u32) -> Option<Vec<Target>> {
    let mut found = Vec::new();
    let mut at = 0usize;
    for _ in 0..count {
        let kind = text(bytes, at + 24, TYPE);
        found.push(Target {
            start: u64_at(bytes, at)?,
            sectors: u64_at(bytes, at + 8)?,
            kind: (!kind.is_empty()).then(|| kind.to_owned())?,
            parameters: long_text(bytes, at + SPEC)?,
        });
        // The offset of the next line, counted from the first one.
        let next = u32_at(bytes, at + 20)? as usize;
        if found.len() < count as usize && next <= at {
            return None;
        }
        at = next;
    }
    Some(found)
}

/// The flag after the event number of a listed device: its UUID follows.
const HAS_UUID: u32 = 1;

/// The list of all devices; `None` if the kernel's answer is not understood.
pub(super) fn devices(bytes: &[u8], has_uuids: bool) -> Option<Vec<Listed>> {
    let mut found = Vec::new();
    let mut at = 0usize;
    // Only an empty list has a device number of 0.
    if u64_at(bytes, 0)? == 0 {
        return Some(found);
    }
    loop {
        let name = long_text(bytes, at.checked_add(12)?)?;
        // The number of events, the word, and the UUID are aligned to 8 bytes.
        let events = (at + 12 + name.len() + 1).next_multiple_of(8);
        let uuid = match has_uuids {
            false => None,
            true if u32_at(bytes, events + 4)? & HAS_UUID == 0 => Some(String::new()),
            true => Some(long_text(bytes, events + 8)?),
        };
        found.push(Listed {
            rdev: from_kernel(u64_at(bytes, at)?),
            name,
            uuid,
        });
        // The offset of the next entry, counted from this one.
        match u32_at(bytes, at + 8)? as usize {
            0 => return Some(found),
            next => at = at.checked_add(next)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(kind: &str, parameters: &str) -> Target {
        Target {
            start: 0,
            sectors: 2048,
            kind: kind.into(),
            parameters: parameters.into(),
        }
    }

    /// Lines as the kernel answers them: each has the offset of the next one from the first one.
    fn answer(lines: &[Target]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for line in lines {
            let at = bytes.len();
            bytes.extend(line.to_bytes());
            let next = (bytes.len() as u32).to_ne_bytes();
            bytes[at + 20..at + 24].copy_from_slice(&next);
        }
        bytes
    }

    /// A list as a kernel answers it whose entries have UUIDs, which may be empty.
    fn list(entries: &[(u64, &str, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (i, (number, name, uuid)) in entries.iter().enumerate() {
            let events = (12 + name.len() + 1).next_multiple_of(8);
            let length = match uuid.len() {
                0 => events + 8,
                some => (events + 8 + some + 1).next_multiple_of(8),
            };
            let next = if i + 1 < entries.len() { length } else { 0 };
            let at = bytes.len();
            bytes.extend(number.to_ne_bytes());
            bytes.extend((next as u32).to_ne_bytes());
            bytes.extend(name.bytes());
            bytes.resize(at + events, 0);
            bytes.extend(7u32.to_ne_bytes());
            bytes.extend(if uuid.is_empty() { 2u32 } else { HAS_UUID }.to_ne_bytes());
            bytes.extend(uuid.bytes());
            bytes.resize(at + length, 0);
        }
        bytes
    }

    #[test]
    fn an_answer_has_the_lines_of_a_table() {
        let lines = [line("linear", "8:0 0"), line("thin", "253:2 17")];
        let bytes = answer(&lines);
        assert_eq!(targets(&bytes, 2), Some(lines.to_vec()));
        assert_eq!(targets(&bytes, 0), Some(Vec::new()));
    }

    #[test]
    fn an_answer_that_ends_early_is_not_understood() {
        let bytes = answer(&[line("linear", "8:0 0"), line("thin", "253:2 17")]);
        let last = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        for length in 0..=last {
            assert_eq!(targets(&bytes[..length], 2), None, "{length} bytes");
        }
    }

    #[test]
    fn an_answer_whose_lines_form_a_circle_is_not_understood() {
        let mut bytes = answer(&[line("linear", "8:0 0"), line("thin", "253:2 17")]);
        bytes[20..24].fill(0);
        assert_eq!(targets(&bytes, u32::MAX), None);
    }

    #[test]
    fn devices_are_listed() {
        let bytes = list(&[(0xfd00, "vg-pool", "LVM-1"), (0xfd01, "other", "")]);
        let listed = |has_uuids| {
            let all = devices(&bytes, has_uuids).unwrap().into_iter();
            all.map(|it| (it.name, it.uuid)).collect::<Vec<_>>()
        };
        let text = |text: &str| Some(text.to_string());
        let (first, second) = ("vg-pool".to_string(), "other".to_string());
        let with = [(first.clone(), text("LVM-1")), (second.clone(), text(""))];
        assert_eq!(listed(true), with);
        // An older kernel leaves the word behind the event number as it was.
        assert_eq!(listed(false), [(first, None), (second, None)]);
        assert_eq!(devices(&[0; 16], true), Some(Vec::new()));
        assert_eq!(devices(&bytes[..bytes.len() - 8], true), None);
        assert_eq!(devices(&bytes[..bytes.len() - 24], false), None);
    }

    #[test]
    fn fuzz_the_answers_of_the_device_mapper() {
        let seeds = [
            answer(&[line("linear", "8:0 0"), line("thin", "253:2 17")]),
            list(&[(0xfd00, "vg-pool", "LVM-1"), (0xfd01, "other", "")]),
        ];
        let both = |bytes: &[u8]| {
            targets(bytes, 2);
            devices(bytes, true);
            devices(bytes, false);
        };
        crate::fuzz::fuzz("device mapper", &seeds, both, |bytes| {
            // A program that trusts the offset.
            if let Some(next) = u32_at(bytes, 20) {
                assert!(bytes.len() >= next as usize, "planted");
            }
        });
    }
}
