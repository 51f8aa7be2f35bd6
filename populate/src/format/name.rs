//! Names in archives. A name that could leave the volume is refused before any path is opened.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::failure::{Failure, Result};

/// The longest path, and the longest part of one: those of Linux.
pub const PATH_BYTES: usize = 4095;
const PART_BYTES: usize = 255;

/// A path below the root of the volume: never absolute, without `.` and `..`, never empty.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Name(Vec<u8>);

impl Name {
    /// Parses the name of an entry; `None` is the root itself.
    pub fn parse(bytes: &[u8]) -> Result<Option<Name>> {
        let refused = |why: &str| {
            let name = String::from_utf8_lossy(&bytes[..bytes.len().min(PART_BYTES)]);
            let what = format!("the archive has the name {name:?}, which {why}");
            Err(Failure::refused("ArchiveRefused", what))
        };
        if bytes.is_empty() {
            return refused("is empty");
        }
        // umoci gives the root of an image this name.
        if bytes == b"/" {
            return Ok(None);
        }
        if bytes.starts_with(b"/") {
            return refused("is absolute");
        }
        if bytes.len() > PATH_BYTES {
            return refused("is too long");
        }
        if bytes.contains(&0) {
            return refused("contains a zero byte");
        }
        let mut path = Vec::with_capacity(bytes.len());
        for part in bytes.split(|byte| *byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return refused("leads out of its folder by `..`"),
                part if part.len() > PART_BYTES => return refused("has a part that is too long"),
                part => {
                    if !path.is_empty() {
                        path.push(b'/');
                    }
                    path.extend_from_slice(part);
                }
            }
        }
        Ok((!path.is_empty()).then_some(Name(path)))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn as_path(&self) -> &Path {
        Path::new(std::ffi::OsStr::from_bytes(&self.0))
    }

    /// The folder, unless that is the root, and the last part.
    pub fn split(&self) -> (Option<Name>, &[u8]) {
        match self.0.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (Some(Name(self.0[..at].to_vec())), &self.0[at + 1..]),
            None => (None, &self.0),
        }
    }

    /// This name and those of the folders above it, the topmost first.
    pub fn with_folders(&self) -> impl Iterator<Item = Name> {
        let ends = self.0.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let ends = ends.map(|(at, _)| at).chain([self.0.len()]);
        ends.map(|end| Name(self.0[..end].to_vec()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Option<String> {
        let name = Name::parse(text.as_bytes()).ok()?;
        Some(name.map_or(String::new(), |name| name.as_path().display().to_string()))
    }

    #[test]
    fn names_are_relative_and_plain() {
        assert_eq!(parsed("a/b"), Some("a/b".into()));
        assert_eq!(parsed("./a//b/./c/"), Some("a/b/c".into()));
        assert_eq!(parsed("."), Some(String::new()));
        assert_eq!(parsed("./"), Some(String::new()));
        assert_eq!(parsed("/"), Some(String::new()));
        assert_eq!(parsed("..a/...b/c.."), Some("..a/...b/c..".into()));
        let long_part = "a".repeat(256);
        let long_path = "a/".repeat(2048);
        for text in [
            "",
            "//",
            "/a",
            "..",
            "a/..",
            "../a",
            "a/../../b",
            "a\0b",
            "./..",
            &long_part,
            &long_path,
        ] {
            assert_eq!(parsed(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_name_is_split_into_its_folders() {
        let name = Name::parse(b"a/b/c").expect("valid").expect("a name");
        let all: Vec<_> = name.with_folders().map(|name| name.to_string()).collect();
        assert_eq!(all, ["\"a\"", "\"a/b\"", "\"a/b/c\""]);
        assert_eq!(name.split().1, b"c");
    }

    proptest! {
        /// Whatever is accepted stays below the root.
        #[test]
        fn an_accepted_name_stays_below_the_root(parts in prop::collection::vec(
            prop::sample::select(vec!["", ".", "..", "a", "b", "\0", "..."]), 0..8)) {
            let text = parts.join("/");
            if let Ok(Some(name)) = Name::parse(text.as_bytes()) {
                let path = name.as_path();
                prop_assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
                prop_assert!(!text.starts_with('/') && !parts.contains(&".."));
            }
        }
    }
}
