//! A snapshot's image and record. The image is created empty before the cut, which fills it.

use uuid::Uuid;

use super::PoolBackend;
use crate::backend::store::NewImage;
use crate::backend::{Admit, Image};
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::model::size::image_bytes;
use crate::record::SnapshotRecord;

impl PoolBackend {
    /// Creates an empty snapshot in the state of its record (`preparing`): records the intent, then
    /// creates an image that is as long as that of its source and has no blocks. A snapshot of a
    /// thick volume counts with its full size until it is ready. On an error nothing is left, or
    /// the error is [`Error::RollbackFailed`].
    pub fn prepare_snapshot(&self, record: &SnapshotRecord, admit: Admit<'_>) -> Result<()> {
        let admitted = self.admit_snapshot(record, admit)?;
        let begun = self.begin_snapshots(&[admitted]);
        self.snapshots.or_delete(record.uuid, begun)
    }

    /// The first step of [`PoolBackend::prepare_snapshot`], which changes nothing on disk: counts the
    /// snapshot as one of the pool. The caller begins it or deletes it.
    pub fn admit_snapshot(
        &self,
        record: &SnapshotRecord,
        admit: Admit<'_>,
    ) -> Result<SnapshotRecord> {
        let source = self.volumes.get(record.source)?;
        let source = source.filter(|source| source.incarnation == record.source_incarnation);
        let source = source.ok_or_else(|| Error::NotFound {
            kind: Kind::Volume,
            id: record.source.to_string(),
        })?;
        let mut record = SnapshotRecord {
            lineage: source.lineage,
            foreign_bytes: source.foreign_bytes,
            ..record.clone()
        };
        let planned = record.clone();
        self.admit_with_planned(Some(&planned), admit, |_| {
            record.image = self.store().allocate_id()?;
            self.snapshots.remember(&record);
            Ok(())
        })?;
        Ok(record)
    }

    /// The second step of [`PoolBackend::prepare_snapshot`], for several snapshots that were admitted.
    /// An error or a crash leaves any of them; the caller deletes all.
    pub fn begin_snapshots(&self, records: &[SnapshotRecord]) -> Result<()> {
        self.snapshots.begin(records)?;
        records.iter().try_for_each(|record| {
            let uuid = record.uuid;
            self.abort_growth(record.source)?;
            let doing = || format!("create snapshot {uuid}");
            let source = Image::Volume(record.source);
            // An image whose growth failed is longer than its record says.
            let found = self.store().length(source).context(doing)?;
            let new = NewImage {
                like: Some(source),
                length: found.unwrap_or(0).max(image_bytes(record.size)),
                reserve: false,
            };
            let created = self.store().create(Image::Snapshot(uuid), new);
            created.context(doing)?;
            match record.copy {
                // A copy that continues after a crash needs its image.
                Some(_) => self.snapshots.sync(uuid),
                None => Ok(()),
            }
        })
    }

    /// Replaces a snapshot's record durably. The backend sets the lineage, the foreign bytes and
    /// the number of the image, so they stay whatever the caller's record contains.
    pub fn update_snapshot(&self, record: &SnapshotRecord) -> Result<()> {
        self.update_snapshots(&[record])
    }

    /// The same for several records. After an error or a crash, each is the old or the new one.
    pub fn update_snapshots(&self, records: &[&SnapshotRecord]) -> Result<()> {
        let uuids: Vec<Uuid> = records.iter().map(|record| record.uuid).collect();
        self.snapshots.sync_records(&uuids)?;
        let each = records.iter().map(|record| {
            let before = self.snapshots.get(record.uuid)?;
            let before = before.as_ref().unwrap_or(record);
            Ok(SnapshotRecord {
                lineage: before.lineage,
                foreign_bytes: before.foreign_bytes,
                image: before.image,
                ..(*record).clone()
            })
        });
        let each: Vec<SnapshotRecord> = each.collect::<Result<_>>()?;
        self.snapshots.update_all(&each)
    }
}
