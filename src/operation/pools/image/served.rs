//! Images of pools that are served: opened at the start, closed at the end of the process.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{OpenImage, close, open};
use crate::backend::file::FileBackend;
use crate::error::{Result, chain};
use crate::host::Host;
use crate::model::PoolDefinition;
use crate::operation::pools::make;
use crate::operation::pools::start::folder;
use crate::operation::{Driver, Pool, ServingState};
use crate::record::PoolRecord;

impl Driver {
    /// Opens the image of a definition that has one, made before or to be made now; with what lies
    /// in it, or at the path of a definition without.
    pub(in crate::operation) fn open_image(
        &self,
        definition: &PoolDefinition,
        found: make::Probe,
        may_be_new: bool,
        patience: Duration,
    ) -> Result<(Option<OpenImage>, make::Probe)> {
        let host = self.host.as_ref();
        let Some(size) = definition.image else {
            return Ok((None, found));
        };
        match found {
            make::Probe::Image(_) => {}
            make::Probe::Blank if definition.init && may_be_new => {}
            make::Probe::Missing if definition.init && may_be_new => {
                make::make_folder(host, &folder(definition))?;
            }
            found => return Ok((None, found)),
        }
        let image = open(host, definition, size, patience, &self.machine_folders())?;
        let found = make::probe(host, &image.folder)?;
        Ok((Some(image), found))
    }

    /// At the end of the process, once nothing runs: unmounts the images that no volume uses. One
    /// that is used stays, and is found by the next start.
    pub fn leave(&self) {
        if self.running() > 0 {
            return;
        }
        let states =
            std::mem::take(&mut *self.pools.write().unwrap_or_else(PoisonError::into_inner));
        for state in states {
            let ServingState::Serving(pool) = state else {
                continue;
            };
            let Some(Pool {
                backend,
                image: Some(image),
                definition,
                ..
            }) = self.sole(pool)
            else {
                continue;
            };
            // It has the folder open.
            drop(backend);
            let name = &definition.name;
            match close(self.host.as_ref(), image) {
                Ok(true) => tracing::info!(pool = %name, "unmounted the image of the pool"),
                Ok(false) => {
                    tracing::info!(pool = %name, "keeping the image of the pool mounted because volumes use it");
                }
                Err(error) => {
                    tracing::warn!(pool = %name, error = %chain(&error), "failed to unmount the image of the pool");
                }
            }
        }
    }
}

impl Driver {
    /// The pool, once the looks at it have ended, which take a moment.
    fn sole(&self, mut pool: Arc<Pool>) -> Option<Pool> {
        const TRIES: u32 = 200;
        const WAIT: Duration = Duration::from_millis(10);
        for _ in 0..TRIES {
            pool = match Arc::try_unwrap(pool) {
                Ok(pool) => return Some(pool),
                Err(shared) => shared,
            };
            self.host.pause(WAIT);
        }
        None
    }
}

/// Who a pool is that is there. An image is mounted for it, and found mounted when it's opened.
pub(in crate::operation) fn identify(
    host: &dyn Host,
    definition: &PoolDefinition,
    machine: &[PathBuf],
) -> Result<Option<PoolRecord>> {
    let path = folder(definition);
    match (definition.image, make::probe(host, &path)?) {
        (Some(size), make::Probe::Image(_)) => {
            let image = open(host, definition, size, Duration::ZERO, machine)?;
            FileBackend::identify(host, &image.folder)
        }
        (None, make::Probe::Pool(pool)) => Ok(Some(pool)),
        _ => Ok(None),
    }
}
