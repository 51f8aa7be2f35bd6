//! Every call that this driver serves, as a value that can be sent.

use slackwater::csi::*;
use slackwater::service::Rpc;
use tonic::Status;

use crate::service::harness::Node;

macro_rules! calls {
    ($($client:ident $rpc:ident $method:ident $request:ident;)*) => {
        /// A call with its request.
        #[derive(Clone, Debug)]
        pub enum Call {
            $($rpc($request),)*
        }

        impl Call {
            pub fn rpc(&self) -> Rpc {
                match self {
                    $(Call::$rpc(_) => Rpc::$rpc,)*
                }
            }

            /// The answer, in debug format.
            pub async fn send(self, node: &Node) -> Result<String, Status> {
                match self {
                    $(Call::$rpc(request) => {
                        let answer = node.$client.clone().$method(request).await?;
                        Ok(format!("{:?}", answer.into_inner()))
                    })*
                }
            }
        }

        $(
            impl From<$request> for Call {
                fn from(request: $request) -> Call {
                    Call::$rpc(request)
                }
            }
        )*
    };
}

calls! {
    identity GetPluginInfo get_plugin_info GetPluginInfoRequest;
    identity GetPluginCapabilities get_plugin_capabilities GetPluginCapabilitiesRequest;
    identity Probe probe ProbeRequest;
    controller CreateVolume create_volume CreateVolumeRequest;
    controller DeleteVolume delete_volume DeleteVolumeRequest;
    controller ControllerPublishVolume controller_publish_volume ControllerPublishVolumeRequest;
    controller ControllerUnpublishVolume controller_unpublish_volume ControllerUnpublishVolumeRequest;
    controller ValidateVolumeCapabilities validate_volume_capabilities ValidateVolumeCapabilitiesRequest;
    controller ListVolumes list_volumes ListVolumesRequest;
    controller ControllerListVolumeHealth controller_list_volume_health ControllerListVolumeHealthRequest;
    controller ControllerGetVolumeHealth controller_get_volume_health ControllerGetVolumeHealthRequest;
    controller GetCapacity get_capacity GetCapacityRequest;
    controller ControllerGetCapabilities controller_get_capabilities ControllerGetCapabilitiesRequest;
    controller CreateSnapshot create_snapshot CreateSnapshotRequest;
    controller DeleteSnapshot delete_snapshot DeleteSnapshotRequest;
    controller ListSnapshots list_snapshots ListSnapshotsRequest;
    controller GetSnapshot get_snapshot GetSnapshotRequest;
    controller ControllerExpandVolume controller_expand_volume ControllerExpandVolumeRequest;
    controller ControllerGetVolume controller_get_volume ControllerGetVolumeRequest;
    controller ControllerModifyVolume controller_modify_volume ControllerModifyVolumeRequest;
    groups GroupControllerGetCapabilities group_controller_get_capabilities GroupControllerGetCapabilitiesRequest;
    groups CreateVolumeGroupSnapshot create_volume_group_snapshot CreateVolumeGroupSnapshotRequest;
    groups DeleteVolumeGroupSnapshot delete_volume_group_snapshot DeleteVolumeGroupSnapshotRequest;
    groups GetVolumeGroupSnapshot get_volume_group_snapshot GetVolumeGroupSnapshotRequest;
    node NodeStageVolume node_stage_volume NodeStageVolumeRequest;
    node NodeUnstageVolume node_unstage_volume NodeUnstageVolumeRequest;
    node NodePublishVolume node_publish_volume NodePublishVolumeRequest;
    node NodeUnpublishVolume node_unpublish_volume NodeUnpublishVolumeRequest;
    node NodeGetVolumeStats node_get_volume_stats NodeGetVolumeStatsRequest;
    node NodeGetVolumeHealth node_get_volume_health NodeGetVolumeHealthRequest;
    node NodeGetStorageHealth node_get_storage_health NodeGetStorageHealthRequest;
    node NodeExpandVolume node_expand_volume NodeExpandVolumeRequest;
    node NodeGetCapabilities node_get_capabilities NodeGetCapabilitiesRequest;
    node NodeGetInfo node_get_info NodeGetInfoRequest;
}
