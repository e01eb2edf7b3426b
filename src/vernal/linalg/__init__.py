"""Linear algebra with operators known only by their products: trees of arrays in, trees of arrays out."""

from .._ground import publish
from ._arguments import positive_int, real_number, tolerance, whole_number
from ._curvature import gauss_newton_operator as gauss_newton_operator
from ._curvature import hessian_operator as hessian_operator
from ._curvature import jacobian_operator as jacobian_operator
from ._eigsh import Eigenpairs as Eigenpairs
from ._eigsh import eigsh as eigsh
from ._elementwise import Derivative, Elementwise, along
from ._frechet import carried
from ._funm import FunctionProduct as FunctionProduct
from ._funm import funm as funm
from ._kernels import kernel_operator as kernel_operator
from ._lanczos import Tridiagonal as Tridiagonal
from ._lanczos import decompose, symmetric_operator
from ._lanczos import lanczos as lanczos
from ._lanczos_adjoint import Decomposition
from ._operator import Composite
from ._operator import Operator as Operator
from ._operators import FunctionOperator as FunctionOperator
from ._operators import MatrixOperator as MatrixOperator
from ._operators import as_operator, refuse_empty
from ._per_device import fori_loop, settled, varying_like
from ._pivoted_cholesky import Preconditioner as Preconditioner
from ._pivoted_cholesky import pivoted_cholesky as pivoted_cholesky
from ._solve import Solution as Solution
from ._solve import solve as solve
from ._spectral import Hermitian, function_of
from ._structured import block_diagonal as block_diagonal
from ._structured import kronecker as kronecker
from ._svds import SingularTriplets as SingularTriplets
from ._svds import svds as svds
from ._vectors import power_below, power_of_two, stop_gradient, times, to_tree

publish(__name__, globals())
