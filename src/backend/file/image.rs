//! Life of an image: made with an intent before and a completed record after, grown, deleted
//! through the trash.

use std::path::Path;

use uuid::Uuid;

use super::{Entry, FileBackend, IMAGE, Index, RECORD, TRASH, VOLUMES};
use crate::backend::{Admit, Backend, PoolSpace};
use crate::error::{Doing, Error, Result, chain};
use crate::host::Effect;
use crate::model::size::image_bytes;
use crate::model::{Allocation, Wipe};
use crate::record::{self, VolumeRecord, VolumeState};

impl FileBackend {
    /// Room, with what `index` promises.
    pub(super) fn space_of(&self, index: &Index) -> Result<PoolSpace> {
        self.measure(index, true)
    }

    /// Judges by what is known without a look at every image, and looks only if that refuses:
    /// what images fill already makes the room for promises larger, never smaller.
    pub(super) fn admit(&self, index: &Index, admit: Admit<'_>) -> Result<()> {
        match admit(&self.measure(index, false)?) {
            Ok(()) => Ok(()),
            Err(_) => admit(&self.measure(index, true)?),
        }
    }

    /// Without `each`, no image of a volume whose record says its size is looked at.
    fn measure(&self, index: &Index, each: bool) -> Result<PoolSpace> {
        let doing = || format!("measure pool {}", self.path.display());
        let space = self.host.space(&self.root).doing(doing)?;
        let look = |uuid: &Uuid| self.host.stat(&self.image_path(*uuid)).doing(doing);
        let mut allocated = 0;
        let mut promised = index.growing.values().sum::<u64>();
        for (uuid, entry) in &index.entries {
            let image = match entry {
                Entry::Known(_) if !each => None,
                Entry::Known(_) | Entry::Damaged(_) => look(uuid)?,
            };
            allocated += image.map_or(0, |image| image.allocated);
            promised += match entry {
                Entry::Known(record) => image_bytes(record.size),
                // What can't be read is counted as long as its image is.
                Entry::Damaged(_) => image.map_or(0, |image| image.size),
            };
        }
        Ok(PoolSpace {
            total: space.total,
            available: space.available,
            allocated,
            promised,
        })
    }

    /// Missing, too short, or a reserved one that has lost blocks.
    pub(super) fn judge_image(&self, record: &VolumeRecord) -> Result<Option<String>> {
        let image = self
            .host
            .stat(&self.image_path(record.uuid))
            .doing(|| format!("find the image of volume {}", record.uuid))?;
        let bytes = image_bytes(record.size);
        Ok(match image {
            None => Some("the image is missing".into()),
            Some(image) if image.size < bytes => {
                Some(format!("the image has {} of {bytes} bytes", image.size))
            }
            Some(image) if record.allocation == Allocation::Thick && image.allocated < bytes => {
                Some(format!(
                    "{} of {bytes} reserved bytes are left",
                    image.allocated
                ))
            }
            Some(_) => None,
        })
    }

    pub(super) fn create_image(
        &self,
        mut record: VolumeRecord,
        admit: Admit<'_>,
    ) -> Result<VolumeRecord> {
        record.state = VolumeState::Creating;
        {
            let mut index = self.index();
            self.admit(&index, admit)?;
            index
                .entries
                .insert(record.uuid, Entry::Known(Box::new(record.clone())));
        }
        let made = self.make(&record).and_then(|()| {
            record.state = VolumeState::Ready;
            self.update(&record)
        });
        match made {
            Ok(()) => Ok(record),
            Err(first) => match self.delete_volume(record.uuid) {
                Ok(()) => Err(first),
                Err(undo) => Err(Error::Undo {
                    first: Box::new(first),
                    undo: chain(&undo),
                }),
            },
        }
    }

    /// Everything up to the completed record. The image is durable before the record says so.
    fn make(&self, record: &VolumeRecord) -> Result<()> {
        let doing = || format!("make volume {}", record.uuid);
        let (dir, image) = (self.dir(record.uuid), self.image_path(record.uuid));
        self.perform(Effect::MakeDir { path: &dir }, doing)?;
        self.perform(
            Effect::SyncDir {
                path: &self.root.join(VOLUMES),
            },
            doing,
        )?;
        record::store(self.host.as_ref(), &self.record_path(record.uuid), record)?;
        let reserve = record.allocation == Allocation::Thick;
        self.perform(
            Effect::Allocate {
                path: &image,
                size: image_bytes(record.size),
                reserve,
            },
            doing,
        )?;
        self.perform(Effect::SyncFile { path: &image }, doing)
    }

    pub(super) fn grow_image(&self, record: &VolumeRecord, size: u64) -> Result<VolumeRecord> {
        let doing = || format!("grow volume {}", record.uuid);
        let path = self.image_path(record.uuid);
        let reserve = record.allocation == Allocation::Thick;
        let longer = self
            .perform(
                Effect::Allocate {
                    path: &path,
                    size: image_bytes(size),
                    reserve,
                },
                doing,
            )
            .and_then(|()| self.perform(Effect::SyncFile { path: &path }, doing));
        if let Err(first) = longer {
            let undo = self
                .perform(
                    Effect::Shorten {
                        path: &path,
                        size: image_bytes(record.size),
                    },
                    doing,
                )
                .and_then(|()| self.perform(Effect::SyncFile { path: &path }, doing));
            return Err(match undo {
                Ok(()) => first,
                Err(undo) => Error::Undo {
                    first: Box::new(first),
                    undo: chain(&undo),
                },
            });
        }
        let grown = VolumeRecord {
            size,
            ..record.clone()
        };
        // Whether the new record is durable isn't known after an error, so the image stays long:
        // a repeat completes it, and a shorter image under a longer record would lose its tail.
        self.update(&grown).map_err(|first| Error::Undo {
            first: Box::new(first),
            undo: "the image is longer than its record says".into(),
        })?;
        Ok(grown)
    }

    /// One rename takes a volume out of sight; what follows can be repeated by anybody.
    pub(super) fn delete_volume(&self, uuid: Uuid) -> Result<()> {
        let doing = || format!("delete volume {uuid}");
        let dir = self.dir(uuid);
        if self.host.stat(&dir).doing(doing)?.is_some() {
            let tag = self.host.random_uuid().simple().to_string();
            let trash = self.root.join(TRASH).join(format!("{uuid}.{}", &tag[..8]));
            let rename = Effect::Rename {
                from: &dir,
                to: &trash,
            };
            if let Err(error) = self.perform(rename, doing)
                && self.host.stat(&dir).doing(doing)?.is_some()
            {
                return Err(error);
            }
        }
        self.index().entries.remove(&uuid);
        let prefix = format!("{uuid}.");
        let names = self.list(TRASH)?;
        let mut mine = names
            .iter()
            .filter(|name| name.starts_with(&prefix))
            .peekable();
        if mine.peek().is_none() {
            return Ok(());
        }
        let ended = self
            .sync_both()
            .and_then(|()| mine.try_for_each(|name| self.empty_trash(name)));
        // The volume is out of sight, its blocks are not free: not final, a repeat goes on.
        ended.map_err(|first| Error::Undo {
            undo: format!("blocks of volume {uuid} remain"),
            first: Box::new(first),
        })
    }

    /// Makes a rename between the two directories durable.
    pub(super) fn sync_both(&self) -> Result<()> {
        [TRASH, VOLUMES].iter().try_for_each(|folder| {
            self.perform(
                Effect::SyncDir {
                    path: &self.root.join(folder),
                },
                || format!("sync {folder}"),
            )
        })
    }

    /// Ends one entry of the trash: wipes as its record says, frees the blocks, record last.
    pub(super) fn empty_trash(&self, name: &str) -> Result<()> {
        let doing = || format!("empty trash {name}");
        let dir = self.root.join(TRASH).join(name);
        let (image, record_path) = (dir.join(IMAGE), dir.join(RECORD));
        if self.host.stat(&image).doing(doing)?.is_some() {
            // An unreadable record can't ask for a wipe.
            let wipe = match record::load::<VolumeRecord>(self.host.as_ref(), &record_path) {
                Ok(Some(record)) => record.wipe,
                Ok(None) | Err(_) => Wipe::None,
            };
            self.wipe(&image, wipe)?;
            self.perform(Effect::RemoveFile { path: &image }, doing)?;
        }
        for file in self.host.list_dir(&dir).doing(doing)?.unwrap_or_default() {
            self.perform(
                Effect::RemoveFile {
                    path: &dir.join(file),
                },
                doing,
            )?;
        }
        self.perform(Effect::RemoveDir { path: &dir }, doing)?;
        self.perform(
            Effect::SyncDir {
                path: &self.root.join(TRASH),
            },
            doing,
        )
    }

    fn wipe(&self, image: &Path, wipe: Wipe) -> Result<()> {
        let doing = || format!("wipe ({})", wipe.word());
        match wipe {
            Wipe::None => Ok(()),
            Wipe::Zero => self.perform(Effect::Zero { path: image }, doing),
            Wipe::Discard => self.perform(Effect::Discard { path: image }, doing),
        }
    }
}
