//! A snapshot's image and record. The image is created empty before the cut, which fills it.

use super::FileBackend;
use crate::backend::Admit;
use crate::error::{Error, Kind, Result};
use crate::host::Effect;
use crate::model::size::image_bytes;
use crate::record::SnapshotRecord;

impl FileBackend {
    /// Records the intent, then creates an image as long as that of the source, without blocks.
    pub(super) fn begin_snapshot(&self, record: &SnapshotRecord, admit: Admit<'_>) -> Result<()> {
        let uuid = record.uuid;
        let source = self.volumes.get(record.source)?;
        let source = source.filter(|source| source.incarnation == record.source_incarnation);
        let source = source.ok_or_else(|| Error::NotFound {
            kind: Kind::Volume,
            id: record.source.to_string(),
        })?;
        let record = SnapshotRecord {
            lineage: source.lineage,
            ..record.clone()
        };
        let planned = Some(&record);
        self.admit_beside(planned, admit, |_| self.snapshots.remember(&record))?;
        let made = self.snapshots.begin(&record).and_then(|()| {
            let doing = || format!("create snapshot {uuid}");
            let source = self.volumes.image(record.source);
            let path = self.snapshots.image(uuid);
            self.make_like(&path, &source)?;
            // An image whose growth failed is longer than its record says.
            let found = self
                .folder
                .stat(&source, doing)?
                .map_or(0, |image| image.size);
            let image = Effect::Allocate {
                path: &path,
                size: found.max(image_bytes(record.size)),
                reserve: false,
            };
            self.folder.perform(image, doing)?;
            match record.copy {
                // A copy that continues after a crash needs its image.
                Some(_) => self.snapshots.sync(uuid),
                None => Ok(()),
            }
        });
        self.snapshots.or_delete(uuid, made)
    }

    /// The backend sets the lineage, so it stays whatever the caller's record contains.
    pub(super) fn rewrite_snapshot(&self, record: &SnapshotRecord) -> Result<()> {
        let before = self.snapshots.get(record.uuid)?;
        self.snapshots.update(&SnapshotRecord {
            lineage: before.map_or(record.lineage, |before| before.lineage),
            ..record.clone()
        })
    }
}
