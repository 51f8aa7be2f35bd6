//! Reads a pool of image files without its lock, while a driver may serve it.

use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::IMAGE;
use crate::backend::records::{RECORD, StoredRecord};
use crate::error::{ErrorContext, Result, chain};
use crate::host::Host;
use crate::record;

/// A record with the bytes of the blocks that its image has, or why it cannot be read.
type RecordRead<R> = std::result::Result<(R, u64), String>;

/// Reads all volumes, or all snapshots, of the pool in a folder, each with its directory. Those
/// that are deleted during the call are omitted.
pub fn read_all<R: StoredRecord>(
    host: &dyn Host,
    pool: &str,
    path: &Path,
) -> Result<Vec<(PathBuf, RecordRead<R>)>> {
    let folder = path.join(R::PART);
    let names = host.list_dir(&folder);
    let names = names.context(|| format!("list {} of pool {pool}", folder.display()))?;
    let read = names.unwrap_or_default().into_iter().filter_map(|name| {
        let dir = folder.join(&name);
        let read = read_one(host, &dir, &name).transpose()?;
        Some((dir, read))
    });
    Ok(read.collect())
}

fn read_one<R: StoredRecord>(
    host: &dyn Host,
    dir: &Path,
    name: &str,
) -> std::result::Result<Option<(R, u64)>, String> {
    let load = || record::load::<R>(host, &dir.join(RECORD)).map_err(|error| chain(&error));
    let image = || {
        let image = host.stat(&dir.join(IMAGE));
        image.map_err(|error| chain(&error))
    };
    let record = match load()? {
        Some(record) => record,
        // It was deleted between the two reads, or its creation has just begun: an image is created
        // after its record.
        None if image()?.is_none() => return Ok(None),
        None => load()?.ok_or("it has no record.json")?,
    };
    if Uuid::try_parse(name) != Ok(record.uuid()) {
        return Err(format!("its record describes {}", record.uuid()));
    }
    Ok(Some((record, image()?.map_or(0, |stat| stat.allocated))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::records::VOLUMES;
    use crate::host::Effect;
    use crate::host::memory::MemoryHost;
    use crate::record::VolumeRecord;

    #[test]
    fn what_has_just_begun_is_left_out_and_an_image_without_its_record_is_reported() {
        let (host, pool) = (MemoryHost::new(), Path::new("/memory/pool"));
        let one = pool.join(VOLUMES).join(Uuid::from_u128(1).to_string());
        host.make_folder(&one).unwrap();
        let damaged = || {
            let found = read_all::<VolumeRecord>(&host, "default", pool).unwrap();
            found.into_iter().map(|(_, read)| read.unwrap_err())
        };
        let write = |name: &str| {
            let path = one.join(name);
            let bytes = b"{";
            host.perform(&Effect::WriteFile { path: &path, bytes })
        };
        write("record.json.new").unwrap();
        assert_eq!(damaged().count(), 0);
        write("data.img").unwrap();
        let reported: Vec<_> = damaged().collect();
        assert_eq!(reported, ["it has no record.json"]);
    }
}
