//! The name of a thin pool of LVM: `VG/POOL`, and how device mapper spells it.

use std::fmt;
use std::str::FromStr;

/// The longest name of a mapped device: DM_NAME_LEN of linux/dm-ioctl.h is 128, with a zero byte.
const MAX_MAPPED_NAME: usize = 127;
/// What LVM appends to the name of a pool for the devices below it. The longest one counts.
const LONGEST_SUFFIX: &str = "_tdata";
/// Names that LVM refuses for a logical volume (lvm(8), "VALID NAMES").
const RESERVED_STARTS: [&str; 2] = ["snapshot", "pvmove"];
/// Parts of names that LVM uses for logical volumes of its own (lvm(8), "VALID NAMES").
const RESERVED_PARTS: [&str; 17] = [
    "_cdata", "_cmeta", "_corig", "_cpool", "_cvol", "_wcorig", "_mlog", "_mimage", "_pmspare",
    "_rimage", "_rmeta", "_imeta", "_iorig", "_tdata", "_tmeta", "_vdata", "_vorigin",
];

/// A thin pool of LVM. The names follow the rules of LVM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThinPoolName {
    group: String,
    pool: String,
    mapped: String,
}

impl ThinPoolName {
    /// The volume group.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// The logical volume.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// The name of the mapped device of the pool: LVM doubles the hyphens of both names.
    pub fn mapped(&self) -> &str {
        &self.mapped
    }
}

impl fmt::Display for ThinPoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.pool)
    }
}

impl FromStr for ThinPoolName {
    type Err = String;

    fn from_str(text: &str) -> Result<ThinPoolName, String> {
        let Some((group, pool)) = text.split_once('/') else {
            return Err(format!(
                "{text:?} does not name a thin pool; give lvm:VG/POOL"
            ));
        };
        check("volume group", group)?;
        check("logical volume", pool)?;
        if let Some(start) = RESERVED_STARTS
            .iter()
            .find(|start| pool.starts_with(**start))
        {
            return Err(format!(
                "{pool:?} is not a name of a logical volume: LVM reserves names that begin with {start:?}"
            ));
        }
        if let Some(part) = RESERVED_PARTS.iter().find(|part| pool.contains(**part)) {
            return Err(format!(
                "{pool:?} is not a name of a thin pool: LVM reserves names that contain {part:?}; give the pool itself"
            ));
        }
        let [doubled, pool_doubled] = [group, pool].map(|name| name.replace('-', "--"));
        let name = ThinPoolName {
            group: group.into(),
            pool: pool.into(),
            mapped: format!("{doubled}-{pool_doubled}"),
        };
        let length = name.mapped.len() + LONGEST_SUFFIX.len();
        if length > MAX_MAPPED_NAME {
            return Err(format!(
                "the devices of {text:?} have names of up to {length} bytes (each hyphen counts twice); at most {MAX_MAPPED_NAME} are possible"
            ));
        }
        Ok(name)
    }
}

fn check(what: &str, name: &str) -> Result<(), String> {
    let no = |problem: &str| Err(format!("{name:?} is not a name of a {what}: {problem}"));
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "+_.-".contains(c);
    match name {
        "" => no("it is empty; give lvm:VG/POOL"),
        "." | ".." => no("LVM refuses it"),
        _ if !name.chars().all(is_valid) => no("it may contain a-z, A-Z, 0-9 and + _ . -"),
        _ if name.starts_with('-') => no("it must not begin with a hyphen"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_spelled_as_device_mapper_spells_it() {
        let mapped = |text: &str| text.parse::<ThinPoolName>().unwrap().mapped().to_string();
        assert_eq!(mapped("vg/pool"), "vg-pool");
        assert_eq!(mapped("my-vg/thin-pool"), "my--vg-thin--pool");
        assert_ne!(mapped("a-b/c"), mapped("a/b-c"));
    }

    #[test]
    fn names_that_lvm_refuses_are_refused() {
        let long = format!("{}/p", "v".repeat(120));
        let hyphens = format!("vg/a{}", "-".repeat(70));
        for bad in [
            "",
            "vg",
            "/pool",
            "vg/",
            "vg/a/b",
            "vg/a b",
            "-vg/pool",
            "vg/-pool",
            "../pool",
            "vg/.",
            "vg/snapshot1",
            "vg/pool_tdata",
            &long,
            &hyphens,
        ] {
            assert!(bad.parse::<ThinPoolName>().is_err(), "{bad}");
        }
        let name = format!("{}/p", "v".repeat(119));
        assert_eq!(name.parse::<ThinPoolName>().unwrap().to_string(), name);
    }
}
