//! How a pool is defined on the command line:
//! `NAME=file:/path[,init][,image=SIZE][,snapshots=reserved][,extent=SIZE][,overcommit=1][,mount=required][,trim=7d]`
//! or `NAME=lvm:VG/POOL[,init][,overcommit=1][,rawBlock=unfiltered]`.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use super::capability::FsType;
use super::parameters::is_pool_name;
use super::size::{self, HumanBytes, image_bytes};
use super::{MountRule, RawBlock, SnapshotSpacePolicy, ThinPoolName, TrimInterval};

/// The definition of one pool (`--pool`).
#[derive(Clone, Debug, PartialEq)]
pub struct PoolDefinition {
    /// The name that StorageClasses use.
    pub name: String,
    /// Its kind and location.
    pub place: PoolPlace,
    /// Create the pool if it does not exist.
    pub init: bool,
    /// The pool is an xfs file system in one reserved file of at least this many bytes in the
    /// directory, for file systems that cannot share blocks. A multiple of [`size::GRAIN`].
    pub image: Option<u64>,
    /// Whether snapshots may use the space that is guaranteed to volumes; if not set, the pool's
    /// record decides.
    pub snapshots: Option<SnapshotSpacePolicy>,
    /// Size of the extents that xfs allocates to new images; if not set, the file system decides.
    pub extent: Option<u64>,
    /// How many times the capacity of the pool may be provisioned to thin volumes.
    pub overcommit: f64,
    /// Where the pool may be created, if that is restricted.
    pub mount: Option<MountRule>,
    /// How often free blocks of thin volumes are returned to the pool; never if not set.
    pub trim: Option<TrimInterval>,
    /// Whether raw block volumes are allowed unchecked; only for pools of LVM.
    pub raw_block: Option<RawBlock>,
}

/// The options of a definition, after name and location.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolOptions {
    /// See [`PoolDefinition::init`].
    pub init: bool,
    /// See [`PoolDefinition::image`]; not yet rounded up.
    pub image: Option<u64>,
    /// See [`PoolDefinition::snapshots`].
    pub snapshots: Option<SnapshotSpacePolicy>,
    /// See [`PoolDefinition::extent`]; not yet checked.
    pub extent: Option<u64>,
    /// See [`PoolDefinition::overcommit`]; 1 if not set.
    pub overcommit: Option<f64>,
    /// See [`PoolDefinition::mount`].
    pub mount: Option<MountRule>,
    /// See [`PoolDefinition::trim`].
    pub trim: Option<TrimInterval>,
    /// See [`PoolDefinition::raw_block`].
    pub raw_block: Option<RawBlock>,
}

/// The location of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolPlace {
    /// Image files in a directory.
    File {
        /// The absolute path of the directory.
        path: PathBuf,
    },
    /// Thin devices of a thin pool that an administrator has created with LVM.
    Lvm { pool: ThinPoolName },
    /// Simulated; it ends with the process.
    Memory {
        /// Images are thin devices instead of files.
        thin: bool,
    },
}

impl PoolPlace {
    /// Refuses an option that only a pool in a directory can have.
    fn check_is_folder(&self, option: &str) -> Result<(), String> {
        match self {
            PoolPlace::File { .. } => Ok(()),
            PoolPlace::Lvm { .. } | PoolPlace::Memory { .. } => Err(format!(
                "{option} is for pools in a directory: give file:/path"
            )),
        }
    }

    /// How an administrator enlarges the pool, as the end of a sentence.
    pub fn enlarge(&self) -> String {
        match self {
            PoolPlace::Lvm { pool } => {
                format!("enlarge the thin pool: lvextend --size +SIZE {pool}")
            }
            PoolPlace::File { .. } | PoolPlace::Memory { .. } => "enlarge the pool".into(),
        }
    }

    /// Whether it is simulated.
    pub fn is_memory(&self) -> bool {
        matches!(self, PoolPlace::Memory { .. })
    }
}

impl fmt::Display for PoolPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolPlace::File { path } => write!(f, "file:{}", path.display()),
            PoolPlace::Lvm { pool } => write!(f, "lvm:{pool}"),
            PoolPlace::Memory { thin: false } => f.write_str("memory:"),
            PoolPlace::Memory { thin: true } => f.write_str("memory-thin:"),
        }
    }
}

/// Why a text is not a definition of a pool, as a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotAPool(String);

/// What the user can do if a pool's file system cannot share blocks; appended to refusals after a
/// semicolon.
pub const SHARING_ADVICE: &str = "xfs and btrfs can share blocks; on this disk, a pool with an xfs in a reserved file can too: --pool NAME=file:/path/to/an/empty/folder,init,mount=any,image=SIZE";

/// The grammar, for error messages.
const GRAMMAR: &str = "NAME=file:/path[,init][,image=SIZE][,snapshots=reserved|best-effort][,extent=SIZE][,overcommit=N][,mount=required|any][,trim=7d] or NAME=lvm:VG/POOL[,init][,snapshots=...][,overcommit=N][,trim=7d][,rawBlock=unfiltered] or NAME=memory: or NAME=memory-thin:";
/// A larger `extent` would allocate to a volume a significant number of blocks beyond its size.
const MAX_EXTENT: u64 = size::MIB;
/// The largest block size of xfs: an extent is a multiple of it.
const MIN_EXTENT: u64 = 64 * size::KIB;
/// A larger factor than a thousand would be no limit at all.
const MAX_OVERCOMMIT: f64 = 1000.0;

impl PoolDefinition {
    /// Creates a definition from its parts, as a table of the configuration file contains them.
    /// `place` is taken as a whole, so its path may contain a comma.
    pub fn from_parts(
        name: &str,
        place: &str,
        options: PoolOptions,
    ) -> Result<PoolDefinition, NotAPool> {
        let no = |problem: String| NotAPool(format!("pool {name:?}: {problem}"));
        if !is_pool_name(name) {
            return Err(NotAPool(format!(
                "{name:?} is not a valid pool name; give 1 to 63 of a-z, 0-9 and '-', without '-' at the ends"
            )));
        }
        let place = place.parse().map_err(|NotAPool(text)| no(text))?;
        let image = options
            .image
            .map(|bytes| check_image(&place, bytes))
            .transpose()
            .map_err(no)?;
        let extent = options
            .extent
            .map(|bytes| check_extent(&place, bytes))
            .transpose()
            .map_err(no)?;
        let overcommit = options.overcommit.unwrap_or(1.0);
        if !(1.0..=MAX_OVERCOMMIT).contains(&overcommit) {
            return Err(no(format!(
                "overcommit={overcommit} is not valid; give a number from 1 to {MAX_OVERCOMMIT}"
            )));
        }
        if options.mount.is_some() {
            place.check_is_folder("mount=").map_err(no)?;
        }
        if options.raw_block.is_some() && !matches!(place, PoolPlace::Lvm { .. }) {
            return Err(no("rawBlock= is for pools of LVM: give lvm:VG/POOL".into()));
        }
        Ok(PoolDefinition {
            name: name.to_string(),
            place,
            init: options.init,
            image,
            snapshots: options.snapshots,
            extent,
            overcommit,
            mount: options.mount,
            trim: options.trim,
            raw_block: options.raw_block,
        })
    }
}

impl PoolDefinition {
    /// The part of the definition that identifies the pool on a command line, for messages.
    pub fn plainly(&self) -> String {
        let image = self
            .image
            .map_or(String::new(), |bytes| format!(",image={}", exactly(bytes)));
        format!("{}={}{image}", self.name, self.place)
    }
}

/// Checks the size of an image and rounds it up.
fn check_image(place: &PoolPlace, bytes: u64) -> Result<u64, String> {
    place.check_is_folder("image=SIZE")?;
    let least = FsType::Xfs.minimum_bytes();
    if bytes < least {
        return Err(format!(
            "image={bytes} is too small for xfs; give at least {}",
            HumanBytes(least)
        ));
    }
    if bytes > size::MAX {
        return Err(format!("image={bytes} is larger than any file system"));
    }
    Ok(image_bytes(bytes))
}

/// Checks that every xfs accepts the extent size.
fn check_extent(place: &PoolPlace, bytes: u64) -> Result<u64, String> {
    place.check_is_folder("extent=SIZE")?;
    if !bytes.is_power_of_two() || !(MIN_EXTENT..=MAX_EXTENT).contains(&bytes) {
        return Err(format!(
            "extent={bytes} is not valid; give 64Ki, 128Ki, 256Ki, 512Ki or 1Mi"
        ));
    }
    Ok(bytes)
}

impl FromStr for PoolPlace {
    type Err = NotAPool;

    fn from_str(text: &str) -> Result<PoolPlace, NotAPool> {
        if let Some(path) = text.strip_prefix("file:") {
            return Ok(PoolPlace::File {
                path: pool_path(path)?,
            });
        }
        if let Some(name) = text.strip_prefix("lvm:") {
            return match name.parse() {
                Ok(pool) => Ok(PoolPlace::Lvm { pool }),
                Err(problem) => Err(NotAPool(problem)),
            };
        }
        match text {
            "memory:" => return Ok(PoolPlace::Memory { thin: false }),
            "memory-thin:" => return Ok(PoolPlace::Memory { thin: true }),
            _ => {}
        }
        Err(NotAPool(if text.starts_with("memory-thin:") {
            "a memory pool has no path; give \"memory-thin:\" alone".into()
        } else if text.starts_with("memory:") {
            "a memory pool has no path; give \"memory:\" alone".into()
        } else {
            format!("{text:?} is not a place of a pool; give file:/path, lvm:VG/POOL or memory:")
        }))
    }
}

/// Removes doubled and trailing slashes, so that each directory has one spelling.
fn pool_path(text: &str) -> Result<PathBuf, NotAPool> {
    let no = |problem: &str| Err(NotAPool(format!("the path {text:?} {problem}")));
    let path = Path::new(text);
    if !path.is_absolute() {
        return no("is not absolute; give file:/path");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return no("contains \"..\"; give the path without it");
    }
    if text.chars().any(char::is_control) {
        return no("contains a control character");
    }
    let plain: PathBuf = path.components().collect();
    if plain == Path::new("/") {
        return no("is the root directory; give a separate directory");
    }
    Ok(plain)
}

impl FromStr for PoolDefinition {
    type Err = NotAPool;

    fn from_str(text: &str) -> Result<PoolDefinition, NotAPool> {
        let Some((name, rest)) = text.split_once('=') else {
            return Err(NotAPool(format!(
                "{text:?} does not define a pool; give {GRAMMAR}"
            )));
        };
        let no = |problem: String| NotAPool(format!("pool {name:?}: {problem}"));
        let mut words = rest.split(',');
        let place = words.next().unwrap_or_default();
        let mut options = PoolOptions::default();
        for word in words {
            let twice = match word.split_once('=') {
                None if word == "init" => std::mem::replace(&mut options.init, true),
                Some(("overcommit", number)) => options
                    .overcommit
                    .replace(parse_overcommit(number).map_err(no)?)
                    .is_some(),
                Some(("image", bytes)) => {
                    let bytes =
                        size::parse_size(bytes).map_err(|error| no(format!("image: {error}")))?;
                    options.image.replace(bytes).is_some()
                }
                Some(("snapshots", room)) => {
                    let room = room.parse().map_err(no)?;
                    options.snapshots.replace(room).is_some()
                }
                Some(("extent", bytes)) => {
                    let bytes =
                        size::parse_size(bytes).map_err(|error| no(format!("extent: {error}")))?;
                    options.extent.replace(bytes).is_some()
                }
                Some(("mount", rule)) => options.mount.replace(rule.parse().map_err(no)?).is_some(),
                Some(("trim", time)) => options.trim.replace(time.parse().map_err(no)?).is_some(),
                Some(("rawBlock", word)) => {
                    let word = word.parse().map_err(no)?;
                    options.raw_block.replace(word).is_some()
                }
                _ => {
                    return Err(no(format!(
                        "{word:?} is not a known option; known are init, image=SIZE, snapshots=reserved|best-effort, extent=SIZE, overcommit=N, mount=required|any, trim=7d and rawBlock=unfiltered; a path that contains a comma can only be given in the configuration file"
                    )));
                }
            };
            if twice {
                return Err(no(format!("{word:?} is given twice")));
            }
        }
        PoolDefinition::from_parts(name, place, options)
    }
}

fn parse_overcommit(number: &str) -> Result<f64, String> {
    number
        .parse()
        .map_err(|_| format!("overcommit={number} is not a number"))
}

/// A size in the form in which it can be configured, with the largest unit that gives a whole
/// number.
fn exactly(bytes: u64) -> String {
    let units = [(size::GIB, "Gi"), (size::MIB, "Mi"), (size::KIB, "Ki")];
    let found = units.iter().find(|(unit, _)| bytes.is_multiple_of(*unit));
    found.map_or_else(
        || bytes.to_string(),
        |(unit, name)| format!("{}{name}", bytes / unit),
    )
}

impl fmt::Display for PoolDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.place)?;
        if self.init {
            f.write_str(",init")?;
        }
        if let Some(bytes) = self.image {
            write!(f, ",image={}", exactly(bytes))?;
        }
        if let Some(room) = self.snapshots {
            write!(f, ",snapshots={room}")?;
        }
        if let Some(bytes) = self.extent {
            write!(f, ",extent={}", exactly(bytes))?;
        }
        if self.overcommit != 1.0 {
            write!(f, ",overcommit={}", self.overcommit)?;
        }
        if let Some(rule) = self.mount {
            write!(f, ",mount={rule}")?;
        }
        if let Some(interval) = self.trim {
            write!(f, ",trim={interval}")?;
        }
        if let Some(word) = self.raw_block {
            write!(f, ",rawBlock={word}")?;
        }
        Ok(())
    }
}

/// Refuses definitions that conflict with each other: a name used twice, a directory inside
/// another, simulated pools together with real ones.
pub fn check_together(pools: &[PoolDefinition]) -> Result<(), NotAPool> {
    for (at, pool) in pools.iter().enumerate() {
        for other in &pools[..at] {
            check_pair(other, pool)?;
        }
    }
    Ok(())
}

fn check_pair(a: &PoolDefinition, b: &PoolDefinition) -> Result<(), NotAPool> {
    if a.name == b.name {
        return Err(NotAPool(format!("pool {:?} is defined twice", a.name)));
    }
    match (&a.place, &b.place) {
        (PoolPlace::Memory { .. }, PoolPlace::Memory { .. }) => Ok(()),
        (PoolPlace::File { path: outer }, PoolPlace::File { path: inner }) => {
            if inner.starts_with(outer) || outer.starts_with(inner) {
                return Err(NotAPool(format!(
                    "pools {:?} and {:?} have the same directory ({} and {}); give each pool a separate directory",
                    a.name,
                    b.name,
                    outer.display(),
                    inner.display()
                )));
            }
            Ok(())
        }
        (PoolPlace::Lvm { pool }, PoolPlace::Lvm { pool: other }) if pool == other => {
            Err(NotAPool(format!(
                "pools {:?} and {:?} have the same thin pool ({pool}); give each pool one of its own",
                a.name, b.name
            )))
        }
        (PoolPlace::Lvm { .. } | PoolPlace::File { .. }, PoolPlace::Lvm { .. })
        | (PoolPlace::Lvm { .. }, PoolPlace::File { .. }) => Ok(()),
        (PoolPlace::Memory { .. }, PoolPlace::File { .. } | PoolPlace::Lvm { .. })
        | (PoolPlace::File { .. } | PoolPlace::Lvm { .. }, PoolPlace::Memory { .. }) => {
            Err(NotAPool(format!(
                "pools {:?} and {:?} cannot be served together: memory pools are simulated, and a driver cannot serve real and simulated pools",
                a.name, b.name
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(text: &str) -> String {
        text.parse::<PoolDefinition>().unwrap_err().to_string()
    }

    #[test]
    fn each_mistake_has_its_own_message() {
        let slips = [
            "default",
            "Default=file:/a",
            "=file:/a",
            "a=file:b",
            "a=file:",
            "a=file:/b/../c",
            "a=file:/",
            "a=file:/b,c",
            "a=file:/b,init,init",
            "a=file:/b,overcommit=x",
            "a=file:/b,overcommit=0.5",
            "a=file:/b,overcommit=NaN",
            "a=file:/b,overcommit=inf",
            "a=file:/b,overcommit=2,overcommit=3",
            "a=file:/b,image=10Mi",
            "a=file:/b,image=ten",
            "a=file:/b,image=5000000000000000000",
            "a=file:/b,image=1Gi,image=1Gi",
            "a=file:/b,snapshots=all",
            "a=file:/b,snapshots=reserved,snapshots=best-effort",
            "a=file:/b,extent=4Ki",
            "a=file:/b,extent=65537",
            "a=file:/b,extent=2Mi",
            "a=file:/b,extent=big",
            "a=memory:,extent=64Ki",
            "a=file:/b,mount=some",
            "a=file:/b,mount=any,mount=required",
            "a=file:/b,trim=weekly",
            "a=file:/b,trim=7d,trim=1d",
            "a=memory:,image=1Gi",
            "a=memory:,mount=any",
            "a=memory:/b",
            "a=lvm:vg",
            "a=lvm:vg/-thin",
            "a=lvm:vg/thin_tdata",
            "a=lvm:vg/thin,image=1Gi",
            "a=lvm:vg/thin,extent=64Ki",
            "a=lvm:vg/thin,mount=any",
            "a=lvm:vg/thin,rawBlock=yes",
            "a=file:/b,rawBlock=unfiltered",
            "a=zfs:tank",
        ];
        let sentences: Vec<String> = slips
            .iter()
            .map(|slip| format!("{slip}\n    {}", refusal(slip)))
            .collect();
        insta::assert_snapshot!(sentences.join("\n"));
    }

    #[test]
    fn each_folder_has_one_spelling() {
        let plain: PoolDefinition = "a=file:/b/c,init".parse().unwrap();
        assert_eq!("a=file://b/./c/,init".parse(), Ok(plain));
    }

    #[test]
    fn pools_that_exclude_each_other_are_refused() {
        let together = |texts: &[&str]| {
            let pools: Vec<PoolDefinition> = texts.iter().map(|t| t.parse().unwrap()).collect();
            check_together(&pools)
        };
        assert!(together(&["a=file:/x", "b=file:/y", "c=file:/xy"]).is_ok());
        assert!(together(&["a=memory:", "b=memory-thin:"]).is_ok());
        assert!(together(&["a=file:/x", "a=file:/y"]).is_err());
        assert!(together(&["a=file:/x", "b=file:/x/"]).is_err());
        assert!(together(&["a=file:/x/y", "b=file:/x"]).is_err());
        assert!(together(&["a=file:/x", "b=memory:"]).is_err());
        assert!(together(&["a=lvm:v/x", "b=lvm:v/y", "c=file:/x"]).is_ok());
        assert!(together(&["a=lvm:v/x", "b=lvm:v/x"]).is_err());
        assert!(together(&["a=lvm:v/x", "b=memory-thin:"]).is_err());
    }

    proptest! {
        #[test]
        fn a_definition_prints_and_parses_as_inverses(
            name in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?",
            path in "(/[a-zA-Z0-9 =:._-]{1,12}){1,4}",
            init: bool,
            image in proptest::option::of(300 * size::MIB..1 << 60),
            snapshots in proptest::option::of(proptest::sample::select(vec![SnapshotSpacePolicy::Reserved, SnapshotSpacePolicy::BestEffort])),
            extent in proptest::option::of((16u32..=20).prop_map(|power| 1u64 << power)),
            overcommit in 1.0f64..=1000.0,
            mount in proptest::option::of(proptest::sample::select(vec![MountRule::Required, MountRule::Any])),
            trim in proptest::option::of(proptest::sample::select(vec!["1h", "36h", "7d"])),
        ) {
            let trim = trim.map(|text| text.parse().unwrap());
            prop_assume!(!path.split('/').any(|part| part == ".."));
            let options = PoolOptions { init, image, snapshots, extent, overcommit: Some(overcommit), mount, trim, raw_block: None };
            let Ok(pool) = PoolDefinition::from_parts(&name, &format!("file:{path}"), options) else {
                // Only a path that consists of slashes and dots is the root directory.
                prop_assert!(path.chars().all(|c| c == '/' || c == '.'));
                return Ok(());
            };
            prop_assert_eq!(pool.to_string().parse(), Ok(pool));
        }

        #[test]
        fn any_text_is_parsed_without_a_panic(text in any::<String>(), tail in "[a-z]=(file|memory|lvm):/?[a-z,=./0-9]{0,20}") {
            let _ = text.parse::<PoolDefinition>();
            if let Ok(pool) = tail.parse::<PoolDefinition>() {
                prop_assert_eq!(pool.to_string().parse(), Ok(pool));
            }
        }
    }
}
