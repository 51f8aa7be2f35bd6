//! The steps of a restore into another namespace.

use super::stage::{self, Stage};
use super::state::CrossNamespaceRestore;
use crate::change::{Progress, create};
use crate::cli::Change;
use crate::cluster::object::{self, Fields};
use crate::failure::Result;
use crate::restore::plan::SELECTED_NODE;
use crate::restore::{verify, wait};
use crate::text::escaped;
use crate::transfer::{self, Direction};

impl CrossNamespaceRestore<'_> {
    /// Takes steps until a controller has to do something, or until the end.
    pub async fn advance(&self) -> Result<Progress> {
        let (stages, coming) = self.create_copies().await?;
        if let Some(progress) = coming {
            return Ok(progress);
        }
        if let Some(progress) = self.check(&stages).await? {
            return Ok(progress);
        }
        let left = self.transfer_all(stages).await?;
        Ok(left.unwrap_or_else(|| Progress::Ended(Ok(self.ended()))))
    }

    /// Creates the copies. Returns how far they are, and the progress while a volume does not exist.
    async fn create_copies(&self) -> Result<(Vec<Stage>, Option<Progress>)> {
        loop {
            let stages = stage::read_stages(self.cluster, &self.copies).await?;
            self.refuse_different_times(&stages)?;
            if !self.create(&stages).await? {
                let coming = self.select_nodes(&stages).await?;
                return Ok((stages, coming));
            }
        }
    }

    /// Has the copies checked. `None` if nothing is to be checked any more.
    async fn check(&self, stages: &[Stage]) -> Result<Option<Progress>> {
        if !self.is_check_due(stages) {
            return Ok(None);
        }
        let mut copies = self.copies.clone();
        for (copy, stage) in copies.iter_mut().zip(stages) {
            if let Stage::Bound(bound) = stage {
                copy.uid.clone_from(&bound.uid);
            }
        }
        verify::until_success(self.cluster, self.arguments, &copies, &self.is_checked).await
    }

    /// Creates the claims that are missing. `false` if none is.
    async fn create(&self, stages: &[Stage]) -> Result<bool> {
        let mut is_any = false;
        for (copy, stage) in self.copies.iter().zip(stages) {
            if !matches!(stage, Stage::Absent) {
                continue;
            }
            let namespace = &self.cluster.namespace;
            let claim = self.temporary_manifest(copy)?;
            create(
                self.cluster,
                &Change::CONFIRMED,
                &object::CLAIM,
                namespace,
                claim,
            )
            .await?;
            self.chosen.borrow_mut().insert(copy.claim.clone());
            eprintln!("claim {namespace}/{} is created", escaped(&copy.claim));
            is_any = true;
        }
        Ok(is_any)
    }

    /// Has volumes created that do not exist yet. `None` if all exist.
    async fn select_nodes(&self, stages: &[Stage]) -> Result<Option<Progress>> {
        let mut coming = None;
        let mut exist = stages.len();
        for (copy, stage) in self.copies.iter().zip(stages) {
            let Stage::Unbound(claim) = stage else {
                continue;
            };
            exist -= 1;
            coming.get_or_insert(copy.claim.as_str());
            let node = self.node(copy)?;
            let Some(node) = node.filter(|_| claim.annotation(SELECTED_NODE).is_empty()) else {
                continue;
            };
            match wait::select_node(self.cluster, &self.chosen, claim, node).await {
                // It is read again.
                Err(failure) if failure.is_conflict => {}
                done => done?,
            }
        }
        let Some(claim) = coming else {
            return Ok(None);
        };
        let message = wait::last_event(self.cluster, claim).await?;
        Ok(Some(Progress::Running(format!(
            "{exist} of {} volumes exist; claim {claim}: {message}",
            stages.len()
        ))))
    }

    /// Transfers one claim after the other. `None` if all have arrived.
    async fn transfer_all(&self, mut stages: Vec<Stage>) -> Result<Option<Progress>> {
        for (at, copy) in self.copies.iter().enumerate() {
            let volume = match &stages[at] {
                Stage::Bound(bound) => {
                    self.refuse_pods(&stages).await?;
                    bound.volume.clone()
                }
                Stage::Transferring(volume) => volume.clone(),
                _ => continue,
            };
            match transfer::advance(&self.transfer(copy, &volume), Direction::Forward).await? {
                Progress::Ended(Ok(line)) => eprintln!("{}", escaped(&line)),
                other => return Ok(Some(other)),
            }
            stages[at] = Stage::Transferred(volume);
        }
        Ok(None)
    }
}
