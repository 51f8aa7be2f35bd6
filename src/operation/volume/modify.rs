//! ControllerModifyVolume: changes all parameters that the request names, or none.

use crate::error::{Error, Result};
use crate::model::Wipe;
use crate::operation::lock::Key;
use crate::operation::{ModifyVolume, Volumes};

impl Volumes {
    /// ControllerModifyVolume. `wipe` is the one mutable parameter. One record is written, so a
    /// crash leaves all or nothing.
    pub fn modify_volume(&self, request: &ModifyVolume) -> Result<()> {
        let (pool, id, _) = self.pools.get_volume(&request.volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, mut record) = self.pools.get_volume(&request.volume_id)?;
        let Some(wipe) = request.mutable.wipe.filter(|wipe| *wipe != record.wipe) else {
            return Ok(());
        };
        if let (Wipe::Zero, Some(why)) = (wipe, pool.backend.facts.zeroing_refusal) {
            let problem = format!(
                "\"zero\" is not supported by pool {}: {why}",
                pool.definition.name
            );
            return Err(Error::invalid("mutable_parameters.wipe", problem));
        }
        record.wipe = wipe;
        pool.backend.update(&record)
    }
}
