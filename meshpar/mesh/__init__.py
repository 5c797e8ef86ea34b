"""Devices and their names: axes, sizes, and the `jax.sharding.Mesh` they become."""

from meshpar.mesh.axes import AXES as AXES
from meshpar.mesh.axes import BATCH_AXES as BATCH_AXES
from meshpar.mesh.build import abstract_mesh as abstract_mesh
from meshpar.mesh.build import build_mesh as build_mesh
from meshpar.mesh.emulate import emulate as emulate
from meshpar.mesh.emulate import steps_in_flight as steps_in_flight
from meshpar.mesh.spec import MeshSpec as MeshSpec
