//! ListVolumes, ControllerGetVolume, ValidateVolumeCapabilities, and ControllerPublishVolume
//! without state.

use std::sync::Arc;

use super::capability::for_its_readers;
use crate::error::{Error, Kind, Result};
use crate::model::{VolumeId, Wipe};
use crate::operation::request::MAX_LISTED;
use crate::operation::{Attach, ListVolumes, Pool, Validate, Volume, VolumePage, Volumes};
use crate::record::VolumeRecord;

pub(in crate::operation) type Listed = (Arc<Pool>, VolumeRecord);

impl Volumes {
    /// ListVolumes, ordered by ID. The token is the last ID of the previous page, so paging stays
    /// correct when volumes are created or deleted between two pages.
    pub fn list_volumes(&self, request: &ListVolumes) -> Result<VolumePage> {
        let (listed, next_token) = self.page(request)?;
        let volumes = listed
            .iter()
            .map(|(pool, record)| self.pools.volume(pool, record))
            .collect();
        Ok(VolumePage {
            volumes,
            next_token,
        })
    }

    /// One page of the records of all pools. It is an error if one of the pools cannot be read.
    pub(in crate::operation) fn page(
        &self,
        request: &ListVolumes,
    ) -> Result<(Vec<Listed>, String)> {
        let after = match request.starting_token.as_str() {
            "" => None,
            token => Some(token.parse::<VolumeId>().map_err(|_| Error::BadToken {
                token: token.to_string(),
            })?),
        };
        let limit = if request.max_entries == 0 {
            MAX_LISTED
        } else {
            request.max_entries.min(MAX_LISTED)
        };
        let mut pools = self.pools.to_list(request.pool)?;
        pools.sort_by_key(|pool| pool.id());
        let mut page = Vec::new();
        for pool in pools
            .into_iter()
            .filter(|pool| after.is_none_or(|after| pool.id() >= after.pool))
        {
            let from = after
                .filter(|after| after.pool == pool.id())
                .map(|after| after.uuid);
            // One more than requested, to detect whether there is a next page.
            let records = pool.backend.volumes.ready(from, limit + 1 - page.len());
            page.extend(records.into_iter().map(|record| (pool.clone(), record)));
            if page.len() > limit {
                page.truncate(limit);
                let token = page.last().map(|(pool, record)| VolumeId {
                    pool: pool.id(),
                    uuid: record.uuid,
                });
                return Ok((
                    page,
                    token.map(|token| token.to_string()).unwrap_or_default(),
                ));
            }
        }
        Ok((page, String::new()))
    }

    /// ControllerGetVolume.
    pub fn get_volume(&self, volume_id: &str) -> Result<Volume> {
        let (pool, _, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        Ok(self.pools.volume(&pool, &record))
    }

    /// ControllerPublishVolume keeps no state: the node enforces which pods may write.
    pub fn attach_volume(&self, request: &Attach) -> Result<()> {
        if request.read_only {
            return Err(Error::invalid(
                "readonly",
                "true is not supported by ControllerPublishVolume (PUBLISH_READONLY); use readonly of NodePublishVolume",
            ));
        }
        let (_, _, record) = self.pools.get_volume(&request.volume_id)?;
        for_its_readers(&record, &request.capability)?;
        if request.node_id == self.pools.settings.node_name {
            return Ok(());
        }
        Err(Error::NotFound {
            kind: Kind::Node,
            id: request.node_id.clone(),
        })
    }

    /// ValidateVolumeCapabilities: `Ok(Err(message))` means "not confirmed".
    pub fn validate_volume(&self, request: &Validate) -> Result<std::result::Result<(), String>> {
        let (pool, _, record) = self.pools.get_volume_even_if_fenced(&request.volume_id)?;
        Ok(self.confirm(&pool, &record, request))
    }

    fn confirm(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &Validate,
    ) -> std::result::Result<(), String> {
        for capability in &request.capabilities {
            let capability = capability.as_ref().map_err(String::clone)?;
            for_its_readers(record, capability).map_err(|error| error.to_string())?;
            let wanted = capability.access_type.fs();
            if let Some(formatted) = &record.formatted
                && formatted.kind.fs() != wanted
            {
                let wanted = wanted.map_or("block", |fs| fs.name());
                return Err(format!(
                    "the volume is used as {}, so it cannot be used as {wanted}",
                    formatted.kind.as_str()
                ));
            }
        }
        if let Some(parameters) = &request.parameters {
            if let Some(name) = parameters
                .pool
                .as_ref()
                .filter(|name| **name != pool.definition.name)
            {
                return Err(format!(
                    "the volume is in pool {}, not in {name}",
                    pool.definition.name
                ));
            }
            if parameters.allocation != record.allocation {
                let (found, wanted) = (record.allocation.as_str(), parameters.allocation.as_str());
                return Err(format!("the volume's allocation is {found}, not {wanted}"));
            }
        }
        match request.mutable.wipe {
            Some(Wipe::Zero) if pool.backend.facts.zeroing_refusal.is_some() => {
                Err("wipe \"zero\" is not supported by this pool".into())
            }
            Some(_) | None => Ok(()),
        }
    }
}
